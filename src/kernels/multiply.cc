#include "cpu/multiply.h"

#include <algorithm>

#include "coda/cpu/lanes.h"

namespace coda::cpu {

namespace {

/// acc + a·b of what each word holds, as floats.
template <Word word, class L>
CODA_FN L add_product(L a, L b, L acc) {
  static_assert(word == Word::float32);
  return multiply_add(a, b, acc);
}

#if defined(__AVX512F__)
// In assembly, because a compiler that is told of AVX512-BF16 may use it anywhere in this file.
template <>
CODA_FN Lanes<isa::avx512> add_product<Word::bf16_pair>(Lanes<isa::avx512> a, Lanes<isa::avx512> b,
                                                        Lanes<isa::avx512> acc) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v.data) : "v"(a.v.data), "v"(b.v.data));
  return acc;
}
#endif

/// left and right += a's column times b's row for the first depths, as many as the instruction set takes at a time; how many.
template <class Isa, class L, int rows>
CODA_FN int64_t several_depths(int64_t, const float*, const float*, L (&)[rows], L (&)[rows]) {
  return 0;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// In assembly for the number of instructions: beside another hardware thread on its core this loop waits for their decoding, not
// for the multipliers. Compilers keep one depth a turn tight, but copy accumulators from register to register when more are unrolled.
// clang-format off
#define CODA_ROW(a_bytes, i)                                        \
  "vbroadcastss " #a_bytes " + 4 * " #i "(%[a]), %%ymm2\n\t"        \
  "vfmadd231ps %%ymm0, %%ymm2, %[left" #i "]\n\t"                   \
  "vfmadd231ps %%ymm1, %%ymm2, %[right" #i "]\n\t"
#define CODA_DEPTH(a_bytes, b_bytes)                                \
  "vmovups " #b_bytes "(%[b]), %%ymm0\n\t"                          \
  "vmovups " #b_bytes " + 32(%[b]), %%ymm1\n\t"                     \
  CODA_ROW(a_bytes, 0) CODA_ROW(a_bytes, 1) CODA_ROW(a_bytes, 2)    \
  CODA_ROW(a_bytes, 3) CODA_ROW(a_bytes, 4) CODA_ROW(a_bytes, 5)
#define CODA_ACCUMULATORS(i) [left##i] "+x"(left[i].v.data), [right##i] "+x"(right[i].v.data)

template <>
CODA_FN int64_t several_depths<isa::avx2>(int64_t depths, const float* a, const float* b,
                                          Lanes<isa::avx2> (&left)[6], Lanes<isa::avx2> (&right)[6]) {
  int64_t turns = depths / 4;
  if (turns == 0) return 0;
  asm("1:\n\t"
      CODA_DEPTH(0, 0) CODA_DEPTH(24, 64) CODA_DEPTH(48, 128) CODA_DEPTH(72, 192)
      "add $96, %[a]\n\t"
      "add $256, %[b]\n\t"
      "dec %[turns]\n\t"
      "jnz 1b"
      : [a] "+r"(a), [b] "+r"(b), [turns] "+r"(turns), CODA_ACCUMULATORS(0), CODA_ACCUMULATORS(1),
        CODA_ACCUMULATORS(2), CODA_ACCUMULATORS(3), CODA_ACCUMULATORS(4), CODA_ACCUMULATORS(5)
      :
      : "cc", "memory", "ymm0", "ymm1", "ymm2");
  return depths / 4 * 4;
}
#undef CODA_ROW
#undef CODA_DEPTH
#undef CODA_ACCUMULATORS
// clang-format on
#endif

/// One tile. Plain arrays of registers and unrolled loops: nothing here may live in memory. meanwhile(n) is called for n = 0, 1, …
/// in front of each part of so many words.
template <class Isa, Word word, class Meanwhile>
CODA_FN void tile(int64_t words, int64_t part_words, const float* a, const float* b, float* acc, int64_t stride,
                  bool add, Meanwhile&& meanwhile) {
  using L = Lanes<Isa>;
  constexpr int rows = RegisterTile<Isa>::rows, cols = RegisterTile<Isa>::cols, width = L::width;
  static_assert(cols == 2 * width);
  L left[rows], right[rows];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    left[i] = right[i] = L(0.f);
    __builtin_prefetch(acc + i * stride, 1);
  }
  for (int64_t part = 0; part * part_words < words; ++part) {
    meanwhile(part);
    const int64_t some = std::min(part_words, words - part * part_words);
    const int64_t taken = several_depths<Isa>(some, a, b, left, right);
    a += taken * rows;
    b += taken * cols;
    for (int64_t k = taken; k < some; ++k, a += rows, b += cols) {
      const L b_left = load<Isa>(b), b_right = load<Isa>(b + width);
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) {
        const L x(a[i]);
        left[i] = add_product<word>(x, b_left, left[i]);
        right[i] = add_product<word>(x, b_right, right[i]);
      }
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

template <class Isa, Word word>
void multiply(int64_t rows, int64_t cols, int64_t words, const float* a, const float* b, float* acc, int64_t acc_stride,
              bool add, std::span<const Nearby> nearby) {
  constexpr int64_t tile_rows = RegisterTile<Isa>::rows, tile_cols = RegisterTile<Isa>::cols;
  const int64_t panel_bytes = words * tile_cols * static_cast<int64_t>(sizeof(float));
  const int64_t share = panel_bytes / ((rows + tile_rows - 1) / tile_rows) / 64 * 64 + 64;
  // What is nearby is fetched row by row, while the tile is made: all of its rows at once would fill the queue of what is on its
  // way, and the product would wait.
  const int64_t part_words = nearby.empty() ? words : std::max<int64_t>(8, words / tile_rows / 8 * 8);
  const int64_t rows_a_part = (tile_rows * part_words + words - 1) / std::max<int64_t>(words, 1);
  // A panel of b stays in the first-level cache while all of a passes by, and the next one comes from the third.
  for (int64_t j = 0; j < cols; j += tile_cols)
    for (int64_t i = 0; i < rows; i += tile_rows) {
      const float* panel = b + j * words;
      fetch(reinterpret_cast<const char*>(panel) + panel_bytes + i / tile_rows * share, share);
      const auto fetch_nearby = [&](int64_t part) __attribute__((always_inline)) {
        const int64_t first = i + part * rows_a_part, end = std::min({rows, i + tile_rows, first + rows_a_part});
        for (const Nearby& n : nearby)
          for (int64_t row = first; row < end; ++row)
            fetch(n.first + row * n.row_bytes + j * n.column_bytes / 16, tile_cols * n.column_bytes / 16);
      };
      tile<Isa, word>(words, part_words, a + i * words, panel, acc + i * acc_stride + j, acc_stride, add, fetch_nearby);
    }
}

#define CODA_MULTIPLY(word)                                                                                           \
  template void multiply<isa::CODA_ISA, word>(int64_t, int64_t, int64_t, const float*, const float*, float*, int64_t, \
                                              bool, std::span<const Nearby>)
CODA_MULTIPLY(Word::float32);
#if defined(__AVX512F__)
CODA_MULTIPLY(Word::bf16_pair);
#endif

}  // namespace coda::cpu
