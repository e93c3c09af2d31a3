#include "cpu/multiply.h"

#include <algorithm>

#include "coda/cpu/lanes.h"

namespace coda::cpu {

namespace {

/// One tile. Plain arrays of registers and unrolled loops: nothing here may live in memory.
template <class Isa>
CODA_FN void tile(int64_t depths, const float* a, const float* b, float* acc, int64_t stride, bool add) {
  using L = Lanes<Isa>;
  constexpr int rows = RegisterTile<Isa>::rows, cols = RegisterTile<Isa>::cols, width = L::width;
  static_assert(cols == 2 * width);
  L left[rows], right[rows];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    left[i] = right[i] = L(0.f);
    __builtin_prefetch(acc + i * stride, 1);
  }
  for (int64_t k = 0; k < depths; ++k, a += rows, b += cols) {
    const L b_left = load<Isa>(b), b_right = load<Isa>(b + width);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const L x(a[i]);
      left[i] = multiply_add(x, b_left, left[i]);
      right[i] = multiply_add(x, b_right, right[i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    float* row = acc + i * stride;
    if (add) {
      left[i] = left[i] + load<Isa>(row);
      right[i] = right[i] + load<Isa>(row + width);
    }
    store<Isa>(row, left[i]);
    store<Isa>(row + width, right[i]);
  }
}

/// Fetches [p, p + bytes) into the second-level cache.
CODA_FN void fetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace

template <class Isa>
void multiply(int64_t rows, int64_t cols, int64_t depths, const float* a, const float* b, float* acc,
              int64_t acc_stride, bool add, bool fetch_b, std::span<const Nearby> nearby) {
  constexpr int64_t tile_rows = RegisterTile<Isa>::rows, tile_cols = RegisterTile<Isa>::cols;
  const int64_t panel_bytes = depths * tile_cols * static_cast<int64_t>(sizeof(float));
  const int64_t share = panel_bytes / ((rows + tile_rows - 1) / tile_rows) / 64 * 64 + 64;
  // A panel of b stays in the first-level cache while all of a passes by, and the next one comes from the third.
  for (int64_t j = 0; j < cols; j += tile_cols)
    for (int64_t i = 0; i < rows; i += tile_rows) {
      const float* panel = b + j * depths;
      if (fetch_b) fetch(reinterpret_cast<const char*>(panel) + panel_bytes + i / tile_rows * share, share);
      for (const Nearby& n : nearby)
        for (int64_t row = i; row < std::min(rows, i + tile_rows); ++row)
          fetch(n.first + row * n.row_bytes + j * n.column_bytes / 16, tile_cols * n.column_bytes / 16);
      tile<Isa>(depths, a + i * depths, panel, acc + i * acc_stride + j, acc_stride, add);
    }
}

template void multiply<isa::CODA_ISA>(int64_t, int64_t, int64_t, const float*, const float*, float*, int64_t, bool,
                                      bool, std::span<const Nearby>);

}  // namespace coda::cpu
