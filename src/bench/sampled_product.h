// Some rows of a large product in double precision.
#pragma once
#include "coda/cpu.h"
#include "coda/tensor.h"
#include "oracle/oracle.h"

namespace coda::bench {

/// a·bᵀ, a [S, K] the rows in question, few; b [N, K] or, transposed, stored as [K, N].
oracle::Grid<double> sampled_product(Cpu& cpu, const oracle::Grid<double>& a, Matrix<const bf16> b, bool transposed);

}  // namespace coda::bench
