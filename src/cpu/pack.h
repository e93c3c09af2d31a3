// Copies of a product's factors in the order in which the micro-kernel reads them, converted to float.
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

struct Packing {
  decltype(&pack_columns<isa::generic>) columns;
  decltype(&pack_rows<isa::generic>) rows;
};
/// The functions for the instruction set in use.
Packing packing();

}  // namespace coda::cpu
