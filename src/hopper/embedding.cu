// Embedding on a GPU: a gather, and its transpose as a sum over each token's occurrences in their order.
//
// Backward: CUB's radix sort of (token, position) is stable, so the occurrences of a token follow each other in
// ascending order; a block that finds itself at a token's first occurrence adds them all up. No atomics: the same bits
// every time.
#include "hopper/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include "hopper/launch.h"

namespace coda::hopper {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_kernel(Matrix<const float> table, Vector<const int32_t> tokens, double rms_eps, llama::Stream<bf16> out) {
  __shared__ double sums[kThreads];
  const int64_t i = blockIdx.x;
  const float* row = table.row(tokens[i]);
  bf16* h = out.h.row(i);
  double sum = 0;
  for (int64_t j = threadIdx.x; j < table.cols; j += kThreads) {
    h[j] = bf16(row[j]);
    const double stored = static_cast<double>(static_cast<float>(bf16(row[j])));
    sum += stored * stored;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0)
    out.inv_rms[i] = static_cast<float>(1 / sqrt(sums[0] / static_cast<double>(table.cols) + rms_eps));
}

__global__ void count_up_kernel(Vector<int32_t> out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < out.size) out[i] = static_cast<int32_t>(i);
}

/// A block per sorted occurrence and kThreads columns.
__global__ void __launch_bounds__(kThreads) scatter_kernel(Matrix<const bf16> d_h, Vector<const int32_t> token,
                                                           Vector<const int32_t> position, Matrix<float> d_table) {
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  int64_t i = blockIdx.x;
  const int32_t mine = token[i];
  if (column >= d_table.cols || (i > 0 && token[i - 1] == mine)) return;
  float sum = d_table(mine, column);
#pragma unroll 4
  for (; i < token.size && token[i] == mine; ++i) sum += static_cast<float>(d_h(position[i], column));
  d_table(mine, column) = sum;
}

/// Where things lie in the workspace; the sort's own memory comes last.
struct SortSpace {
  int64_t column_bytes, sort_bytes;

  explicit SortSpace(int64_t tokens) : column_bytes(ceil_div(tokens * int64_t{sizeof(int32_t)}, 256) * 256) {
    size_t bytes = 0;
    const int32_t* in = nullptr;
    int32_t* out = nullptr;
    check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, tokens), "the sort of tokens");
    sort_bytes = static_cast<int64_t>(bytes);
  }
  int64_t bytes() const { return 3 * column_bytes + sort_bytes; }
  Vector<int32_t> column(void* workspace, int index, int64_t tokens) const {
    return {reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + index * column_bytes), tokens};
  }
};

std::string shape(int64_t rows, int64_t cols) {
  return std::to_string(rows) + "x" + std::to_string(cols);
}

}  // namespace

void embedding_forward(const Gpu& gpu, Matrix<const float> table, Vector<const int32_t> tokens, double rms_eps,
                       llama::Stream<bf16> out) {
  if (out.h.rows != tokens.size || out.h.cols != table.cols)
    throw OperandError("h", shape(out.h.rows, out.h.cols), shape(tokens.size, table.cols));
  if (out.inv_rms.size != tokens.size)
    throw OperandError("inv_rms", std::to_string(out.inv_rms.size) + " values", std::to_string(tokens.size));
  if (tokens.size == 0) return;
  launch(gpu, "embedding_forward", gather_kernel, dim3(static_cast<unsigned>(tokens.size)), dim3(kThreads), table,
         tokens, rms_eps, out);
}

int64_t embedding_backward_workspace(const Gpu& gpu, int64_t tokens) {
  const DeviceGuard current(gpu.device());
  return SortSpace(tokens).bytes();
}

void embedding_backward(const Gpu& gpu, Matrix<const bf16> d_h, Vector<const int32_t> tokens, Matrix<float> d_table,
                        bool add) {
  if (d_h.rows != tokens.size || d_h.cols != d_table.cols)
    throw OperandError("d_h", shape(d_h.rows, d_h.cols), shape(tokens.size, d_table.cols));
  const DeviceGuard current(gpu.device());
  const SortSpace space(tokens.size);
  if (gpu.workspace_bytes() < space.bytes())
    throw OperandError("workspace", std::to_string(gpu.workspace_bytes()) + " bytes",
                       std::to_string(space.bytes()) + " (embedding_backward_workspace)");
  if (!add && d_table.rows > 0)
    check(cudaMemset2DAsync(d_table.data, static_cast<size_t>(d_table.stride) * sizeof(float), 0,
                            static_cast<size_t>(d_table.cols) * sizeof(float), static_cast<size_t>(d_table.rows),
                            gpu.stream()),
          "embedding_backward");
  if (tokens.size == 0 || d_table.cols == 0) return;

  const Vector<int32_t> identity = space.column(gpu.workspace(), 0, tokens.size);
  const Vector<int32_t> sorted = space.column(gpu.workspace(), 1, tokens.size);
  const Vector<int32_t> position = space.column(gpu.workspace(), 2, tokens.size);
  launch(gpu, "embedding_backward", count_up_kernel, dim3(static_cast<unsigned>(ceil_div(tokens.size, kThreads))),
         dim3(kThreads), identity);
  size_t bytes = static_cast<size_t>(space.sort_bytes);
  check(cub::DeviceRadixSort::SortPairs(static_cast<char*>(gpu.workspace()) + 3 * space.column_bytes, bytes,
                                        tokens.data, sorted.data, static_cast<const int32_t*>(identity.data),
                                        position.data, tokens.size, 0, 32, gpu.stream()),
        "embedding_backward");
  launch(gpu, "embedding_backward", scatter_kernel,
         dim3(static_cast<unsigned>(tokens.size), static_cast<unsigned>(ceil_div(d_table.cols, kThreads))),
         dim3(kThreads), d_h, Vector<const int32_t>(sorted), Vector<const int32_t>(position), d_table);
}

}  // namespace coda::hopper
