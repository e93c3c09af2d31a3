// The innermost product: tiles of accumulators in registers, over panels of both factors (pack_panels).
#pragma once
#include <cstdint>
#include <span>

#include "coda/gemm.h"
#include "coda/isa.h"
#include "pack.h"

namespace coda::cpu {

/// Accumulators that registers hold, two registers wide: as many rows as leave registers for a row of b and one value of a. And the rows
/// of a block, about: its accumulators and the panels of one part of the depth stay in the second-level cache, of which CPUs
/// with AVX-512 have 1 MB and others may have 512 KB.
template <class Isa>
struct RegisterTile;
template <>
struct RegisterTile<isa::generic> {
  static constexpr int rows = 6, cols = 8, block_rows = 96;
};
template <>
struct RegisterTile<isa::avx2> {
  static constexpr int rows = 6, cols = 16, block_rows = 96;
};
template <>
struct RegisterTile<isa::avx512> {
  static constexpr int rows = 14, cols = 32, block_rows = 192;
};

/// A panel of b is half of a 32 KB first-level cache. Sums are made of parts of its depth: in one running fp32 sum over a vocabulary
/// of a million, small terms would drown in a large one.
inline constexpr int64_t kPanelBytes = 16 * 1024;

/// Memory that the program will touch where a block of accumulators is: what is fetched into cache while the block is made.
struct Nearby {
  const char* first;     // beside the first accumulator
  int64_t row_bytes;     // from one row to the next
  int64_t column_bytes;  // of 16 columns
};

/// acc[i][j] (+)= Σ_k a(i, k)·b(j, k) for i < rows, j < cols, over so many words of k. a and b are packed in panels of the tile's rows and
/// columns; acc has room for whole tiles. The sum over k is made from zero in ascending order and then added, for every
/// element alike, whatever rows and cols are. Each panel of b is fetched while the one before it is used.
template <class Isa, Word word>
void multiply(int64_t rows, int64_t cols, int64_t words, const float* a, const float* b, float* acc, int64_t acc_stride,
              bool add, std::span<const Nearby> nearby);

/// A product's innermost functions for one instruction set.
struct Multiplication {
  using Pack = void (*)(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths,
                        float* out);
  int64_t tile_rows, tile_cols, block_rows, block_words;
  Word word;
  Pack pack_a, pack_b;
  decltype(&multiply<isa::generic, Word::float32>) multiply;

  /// Words of a row of so many values.
  int64_t words(int64_t depths) const { return (depths + values_of(word) - 1) / values_of(word); }
  int64_t block_depths() const { return block_words * values_of(word); }
  /// Rows whose last part of the depth is multiplied, and which the program then takes, at a time: what it reads and writes beside
  /// them is fetched meanwhile, and that of more rows would not all stay in the second-level cache.
  int64_t strip_rows() const { return block_rows / 2; }
};
/// The one in use for factors of these types.
Multiplication multiplication(ElementType a, ElementType b);

}  // namespace coda::cpu
