// A factor that TMA cannot reach, copied to where it can.
#pragma once
#include "coda/gpu.h"

namespace coda::hopper {

/// Elements between the rows of the copy of a matrix of bf16 of this many columns.
constexpr int64_t aligned_stride(int64_t cols) {
  return (cols + 7) / 8 * 8;
}

/// Starts copying rows × cols elements of bf16, `stride` apart, to `to`, aligned_stride(cols) apart. Returns a cudaError_t.
int copy_aligned(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, Gpu::Stream stream);

}  // namespace coda::hopper
