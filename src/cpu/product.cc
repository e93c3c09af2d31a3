#include "product.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "isa.h"
#include "multiply.h"
#include "operand_shape.h"
#include "pool.h"

namespace coda::cpu {

namespace {

using detail::Block;
using detail::Factor;
using detail::ProgramInfo;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

detail::Epilogue chosen(const detail::CpuKernels& kernels) {
  return for_chosen_isa([&](auto isa) {
    using I = decltype(isa);
    return std::is_same_v<I, isa::avx2>     ? kernels.avx2
           : std::is_same_v<I, isa::avx512> ? kernels.avx512
                                            : kernels.generic;
  });
}

/// How m rows are cut into blocks: whole units each, about the same number of them. The sum of an element runs over the depth
/// in the same order whatever this is.
struct RowBlocks {
  int64_t m, unit, count;

  RowBlocks(int64_t rows, int64_t group, const Multiplication& inner, int threads)
      : m(rows), unit(group > 1 ? group : inner.tile_rows) {
    // As many for every thread.
    const int64_t rounds = ceil_div(m, inner.block_rows * threads);
    count = std::min(rounds * threads, ceil_div(m, unit));
  }
  int64_t begin(int64_t block) const { return std::min(m, ceil_div(m, unit) * block / count * unit); }
  int64_t most() const { return ceil_div(ceil_div(m, unit), count) * unit; }
};

/// What the program reads and writes of [m, n] matrices, or half or twice as wide ones.
std::vector<Nearby> tiles_of(const ProgramInfo& program) {
  std::vector<Nearby> tiles;
  for (const detail::Operand& operand : program.operands) {
    const Kind kind = operand.field.kind;
    if (kind != Kind::tile && kind != Kind::half_tile && kind != Kind::double_tile && kind != Kind::accumulate)
      continue;
    const int64_t element = detail::bytes_of(operand.field.element);
    const int64_t columns = detail::needed_shape(operand.field, 1, 16).cols;  // beside 16 accumulators
    tiles.push_back({static_cast<const char*>(operand.data), operand.stride * element, columns * element});
  }
  return tiles;
}

}  // namespace

void product(Cpu& cpu, const Factor& a, const Factor& b, const ProgramInfo& program,
             const detail::CpuKernels& kernels) {
  const int64_t m = a.rows, n = b.rows, depth = a.depth;
  const int threads = cpu.threads();
  const detail::Epilogue epilogue = chosen(kernels);
  const Multiplication inner = multiplication(a.element, b.element);
  const int64_t words = inner.words(depth), block_depths = inner.block_depths();

  const RowBlocks blocks(m, program.row_group, inner, threads);
  const int64_t padded_mb = round_up(blocks.most(), inner.tile_rows);
  const int64_t nb = round_up(std::min(kColBlock, n), std::lcm<int64_t>(program.col_group, inner.tile_cols));
  const int64_t panels = ceil_div(n, nb);
  const int64_t panels_at_once = std::clamp<int64_t>(kPackedWords / (nb * std::max<int64_t>(words, 1)), 1, panels);
  const int64_t panel_words = nb * words;

  const int64_t depth_blocks = ceil_div(depth, block_depths);
  const int64_t last_word = std::max<int64_t>(0, depth_blocks - 1) * inner.block_words;
  const int64_t strip =
      std::min(blocks.most(), round_up(inner.strip_rows(), std::lcm<int64_t>(program.row_group, inner.tile_rows)));
  const std::vector<Nearby> tiles = tiles_of(program);
  float* packed_b = cpu.pool().shared_scratch.floats(panels_at_once * panel_words);
  const int64_t acc_floats = round_up(padded_mb * nb, 16);
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(acc_floats + padded_mb * words + kPanelSlack);

  for (int64_t first_panel = 0; first_panel < panels; first_panel += panels_at_once) {
    const int64_t some_panels = std::min(panels_at_once, panels - first_panel);
    cpu.parallel_for(some_panels * depth_blocks, [&](int64_t index, int) {
      const int64_t panel = index / depth_blocks, part = index % depth_blocks, k = part * block_depths;
      const int64_t col = (first_panel + panel) * nb;
      inner.pack_b(b, col, std::min(nb, n - col), k, std::min(block_depths, depth - k),
                   packed_b + panel * panel_words + part * inner.block_words * nb);
    });

    // Few row blocks are cut along the panels as well, so that every thread has work.
    const int64_t cuts = std::clamp<int64_t>(ceil_div(2 * threads, blocks.count), 1, some_panels);
    cpu.parallel_for(blocks.count * cuts, [&](int64_t index, int thread) {
      const int64_t row = blocks.begin(index / cuts), rows = blocks.begin(index / cuts + 1) - row;
      const int64_t cut = index % cuts;
      float* acc = cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(acc_floats);
      float* packed_a = acc + acc_floats;
      std::vector<Nearby> nearby;
      for (int64_t part = 0; part < depth_blocks; ++part) {
        const int64_t k = part * block_depths;
        inner.pack_a(a, row, rows, k, std::min(block_depths, depth - k),
                     packed_a + part * inner.block_words * padded_mb);
      }
      for (int64_t panel = some_panels * cut / cuts; panel < some_panels * (cut + 1) / cuts; ++panel) {
        const int64_t col = (first_panel + panel) * nb, cols = std::min(nb, n - col);
        const float* b_panels = packed_b + panel * panel_words;
        for (int64_t w = 0; w < last_word; w += inner.block_words)
          inner.multiply(rows, cols, inner.block_words, packed_a + w * padded_mb, b_panels + w * nb, acc, nb, w > 0,
                         {});
        for (int64_t r = 0; r < rows; r += strip) {
          const int64_t strip_rows = std::min(strip, rows - r);
          nearby = tiles;
          for (Nearby& tile : nearby) tile.first += (row + r) * tile.row_bytes + col * tile.column_bytes / 16;
          float* strip_acc = acc + r * nb;
          inner.multiply(strip_rows, cols, words - last_word,
                         packed_a + last_word * padded_mb + r * (words - last_word), b_panels + last_word * nb,
                         strip_acc, nb, last_word > 0, nearby);
          epilogue(program.program, Block{.acc = strip_acc,
                                          .acc_stride = nb,
                                          .row = row + r,
                                          .col = col,
                                          .rows = strip_rows,
                                          .cols = cols,
                                          .m = m,
                                          .n = n});
        }
      }
    });
  }
}

void map_tile(Cpu& cpu, const Factor& tile, const ProgramInfo& program, const detail::CpuKernels& kernels) {
  const int64_t m = tile.rows, n = tile.depth;
  const detail::Epilogue epilogue = chosen(kernels);
  const auto copy_rows = for_chosen_isa([](auto isa) { return &pack_rows<decltype(isa)>; });
  const int64_t mb = round_up(16, program.row_group);
  const int64_t nb = round_up(std::min<int64_t>(512, round_up(n, 16)), std::lcm<int64_t>(program.col_group, 16));
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(mb * nb);
  cpu.parallel_for(ceil_div(m, mb), [&](int64_t index, int thread) {
    const int64_t row = index * mb, rows = std::min(mb, m - row);
    float* acc = cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(mb * nb);
    for (int64_t col = 0; col < n; col += nb) {
      const int64_t cols = std::min(nb, n - col);
      copy_rows(tile, row, rows, col, cols, acc, nb);
      epilogue(program.program,
               Block{.acc = acc, .acc_stride = nb, .row = row, .col = col, .rows = rows, .cols = cols, .m = m, .n = n});
    }
  });
}

}  // namespace coda::cpu
