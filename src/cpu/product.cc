#include "product.h"

#include <algorithm>
#include <numeric>

#include "isa.h"
#include "microkernel.h"
#include "pack.h"
#include "pool.h"

namespace coda::cpu {

namespace {

using detail::Block;
using detail::Factor;
using detail::ProgramInfo;

// Accumulators of a block: about 96 × 128 floats, 48 KB; with the panels of one depth block they stay in a 512 KB L2.
// 96 is sixteen of the micro-kernel's rows on AVX2, 128 the width of most partial reductions.
constexpr int64_t kRowBlock = 96;
constexpr int64_t kColBlock = 128;
constexpr int64_t kDepthBlock = 256;
// A sum longer than this is made of parts of this length: in one running fp32 sum over a vocabulary of a million, small
// terms drown in a large one (4e-4 of the result, measured; with parts 3e-6).
constexpr int64_t kDepthPart = 16 * kDepthBlock;
// Columns of b are packed this many floats at a time: enough to spread over threads, small beside the tensors.
constexpr int64_t kPanelFloats = int64_t{4} << 20;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

detail::Epilogue chosen_epilogue(const ProgramInfo& program) {
  switch (chosen_isa()) {
    case Isa::avx2:
      return program.avx2;
    case Isa::avx512:
      return program.avx512;
    case Isa::generic:
      break;
  }
  return program.generic;
}

/// Rows of a block: near kRowBlock, such that every thread gets about the same number of them. The sum of an element
/// runs over the depth in the same order whatever this is.
int64_t row_block(int64_t m, int64_t group, int threads) {
  const int64_t rounds = ceil_div(m, kRowBlock * threads);
  const int64_t even = ceil_div(m, rounds * threads);
  return round_up(std::max<int64_t>(1, even), group > 1 ? group : std::min<int64_t>(6, even));
}

/// Whether rows of a can be read where they are: floats, along the depth.
bool readable_in_place(const Factor& a) {
  return a.element == ElementType::float32 && !a.transposed;
}

}  // namespace

void product(Cpu& cpu, const Factor& a, const Factor& b, const ProgramInfo& program) {
  const int64_t m = a.rows, n = b.rows, depth = a.depth;
  const int threads = cpu.threads();
  const detail::Epilogue epilogue = chosen_epilogue(program);
  const Packing pack = packing();

  const int64_t mb = row_block(m, program.row_group, threads);
  const int64_t nb = round_up(std::min(kColBlock, round_up(n, 16)), std::lcm<int64_t>(program.col_group, 16));
  const int64_t row_blocks = ceil_div(m, mb);
  const int64_t panels = ceil_div(n, nb);
  const int64_t panels_at_once = std::clamp<int64_t>(kPanelFloats / (nb * std::max<int64_t>(depth, 1)), 1, panels);
  const int64_t panel_floats = nb * depth;
  const bool pack_a = !readable_in_place(a);

  float* packed_b = cpu.pool().shared_scratch.floats(panels_at_once * panel_floats);
  const int64_t acc_floats = round_up(mb * nb, 16);
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(2 * acc_floats + (pack_a ? mb * depth : 0));

  for (int64_t first_panel = 0; first_panel < panels; first_panel += panels_at_once) {
    const int64_t some_panels = std::min(panels_at_once, panels - first_panel);
    const int64_t depth_blocks = ceil_div(depth, kDepthBlock);
    cpu.parallel_for(some_panels * depth_blocks, [&](int64_t index, int) {
      const int64_t panel = index / depth_blocks, k = index % depth_blocks * kDepthBlock;
      const int64_t col = (first_panel + panel) * nb;
      pack.columns(b, col, std::min(nb, n - col), k, std::min(kDepthBlock, depth - k),
                   packed_b + panel * panel_floats + k * nb, nb);
    });

    // Few row blocks are cut along the panels as well, so that every thread has work.
    const int64_t cuts = std::clamp<int64_t>(ceil_div(2 * threads, row_blocks), 1, some_panels);
    cpu.parallel_for(row_blocks * cuts, [&](int64_t index, int thread) {
      const int64_t row = index / cuts * mb, rows = std::min(mb, m - row);
      const int64_t cut = index % cuts;
      float* acc = cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(2 * acc_floats);
      float* part = acc + acc_floats;
      const float* a_rows;
      int64_t a_stride;
      if (pack_a) {
        float* packed_a = acc + 2 * acc_floats;
        pack.rows(a, row, rows, 0, depth, packed_a, depth);
        a_rows = packed_a;
        a_stride = depth;
      } else {
        a_rows = static_cast<const float*>(a.data) + row * a.stride;
        a_stride = a.stride;
      }
      for (int64_t panel = some_panels * cut / cuts; panel < some_panels * (cut + 1) / cuts; ++panel) {
        const int64_t col = (first_panel + panel) * nb, cols = std::min(nb, n - col);
        const int64_t padded_cols = round_up(cols, 16);
        if (depth == 0) std::fill_n(acc, rows * nb, 0.f);
        for (int64_t k = 0; k < depth; k += kDepthBlock) {
          const int64_t depths = std::min(kDepthBlock, depth - k);
          const Microkernel multiply(rows, padded_cols, depths, a_stride, nb, nb, k % kDepthPart > 0);
          multiply(a_rows + k, packed_b + panel * panel_floats + k * nb, k < kDepthPart ? acc : part);
          const bool ends_part = (k + kDepthBlock) % kDepthPart == 0 || k + kDepthBlock >= depth;
          if (k >= kDepthPart && ends_part)
            for (int64_t i = 0; i < rows; ++i)
              for (int64_t j = 0; j < padded_cols; ++j) acc[i * nb + j] += part[i * nb + j];
        }
        epilogue(
            program.program,
            Block{.acc = acc, .acc_stride = nb, .row = row, .col = col, .rows = rows, .cols = cols, .m = m, .n = n});
      }
    });
  }
}

void map_tile(Cpu& cpu, const Factor& tile, const ProgramInfo& program) {
  const int64_t m = tile.rows, n = tile.depth;
  const detail::Epilogue epilogue = chosen_epilogue(program);
  const Packing pack = packing();
  const int64_t mb = round_up(16, program.row_group);
  const int64_t nb = round_up(std::min<int64_t>(512, round_up(n, 16)), std::lcm<int64_t>(program.col_group, 16));
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(mb * nb);
  cpu.parallel_for(ceil_div(m, mb), [&](int64_t index, int thread) {
    const int64_t row = index * mb, rows = std::min(mb, m - row);
    float* acc = cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(mb * nb);
    for (int64_t col = 0; col < n; col += nb) {
      const int64_t cols = std::min(nb, n - col);
      pack.rows(tile, row, rows, col, cols, acc, nb);
      epilogue(program.program,
               Block{.acc = acc, .acc_stride = nb, .row = row, .col = col, .rows = rows, .cols = cols, .m = m, .n = n});
    }
  });
}

}  // namespace coda::cpu
