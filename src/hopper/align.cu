#include <algorithm>

#include "hopper/align.h"

namespace coda::hopper {

namespace {

__global__ void copy_rows(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, int64_t to_stride) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) to[row * to_stride + col] = from[row * stride + col];
}

}  // namespace

int copy_aligned(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, Gpu::Stream stream) {
  constexpr int64_t kMostBlocks = 4096;
  copy_rows<<<static_cast<unsigned>(std::min(rows, kMostBlocks)), 256, 0, stream>>>(from, stride, rows, cols, to,
                                                                                    aligned_stride(cols));
  return cudaGetLastError();
}

}  // namespace coda::hopper
