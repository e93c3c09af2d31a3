// Copies of factors in another order, converted to float.
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

/// Panels of width rows, one after the other: out[panel][k][i] = factor(row + panel·width + i, depth + k), zero past rows. out has room
/// for kPanelSlack floats more, which may be overwritten.
template <class Isa, int kWidth>
void pack_panels(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out);
inline constexpr int64_t kPanelSlack = 16;

}  // namespace coda::cpu
