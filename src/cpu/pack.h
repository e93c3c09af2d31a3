// Copies of factors in another order, converted to float or paired.
#pragma once
#include "coda/gemm.h"
#include "coda/isa.h"

namespace coda::cpu {

/// out[k][j] = factor(row + j, depth + k), k < depths, j < rows; zero for rows <= j < width. width is the row length of out.
template <class Isa>
void pack_columns(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out,
                  int64_t width);

/// out[i][k] = factor(row + i, depth + k), i < rows, k < depths. stride is the row length of out.
template <class Isa>
void pack_rows(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out,
               int64_t stride);

/// What the 32 bits of a panel's word hold: a value as float, or the bf16 values of two neighbouring depths, the first in the low half.
enum class Word { float32, bf16_pair };
constexpr int64_t values_of(Word word) {
  return word == Word::bf16_pair ? 2 : 1;
}

/// Panels of width rows, one after the other: out[panel][k][i] = factor(row + panel·width + i, depth + k), zero past rows. For pairs
/// k counts words, the factor is bf16, and the last of an odd number of depths is paired with zero. out has room for kPanelSlack
/// words more, which may be overwritten.
template <class Isa, int kWidth, Word word>
void pack_panels(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out);
inline constexpr int64_t kPanelSlack = 16;

}  // namespace coda::cpu
