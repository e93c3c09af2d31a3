// A block has a row and threads go along it: nothing here is timed.
#include "bench/torch/packed.h"

#include "hopper/launch.h"

namespace coda::bench {

namespace {

constexpr int kThreads = 256;

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Matrix<const From> plain, PackedOrders order, Matrix<To> packed, const bf16* gamma) {
  const int64_t row = blockIdx.x, to = order.rows.packed(row);
  for (int64_t col = threadIdx.x; col < plain.cols; col += kThreads) {
    const float x = static_cast<float>(plain(row, col));
    packed(to, order.cols.packed(col)) = To(gamma == nullptr ? x : x * static_cast<float>(gamma[col]));
  }
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(Matrix<const From> packed, PackedOrders order, Matrix<To> plain, int64_t first_col) {
  const int64_t row = blockIdx.x, from = order.rows.packed(row);
  for (int64_t col = threadIdx.x; col < plain.cols; col += kThreads)
    plain(row, col) = To(static_cast<float>(packed(from, order.cols.packed(first_col + col))));
}

__global__ void narrow_kernel(Vector<const int64_t> from, Vector<int32_t> to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < to.size) to[i] = static_cast<int32_t>(from[i]);
}

}  // namespace

template <class From, class To>
void pack(Matrix<const From> plain, const PackedOrders& order, Matrix<To> packed, const bf16* gamma) {
  pack_kernel<<<static_cast<unsigned>(plain.rows), kThreads>>>(plain, order, packed, gamma);
  hopper::check(cudaGetLastError(), "packing");
}
template <class From, class To>
void unpack(Matrix<const From> packed, const PackedOrders& order, Matrix<To> plain, int64_t first_col) {
  unpack_kernel<<<static_cast<unsigned>(plain.rows), kThreads>>>(packed, order, plain, first_col);
  hopper::check(cudaGetLastError(), "unpacking");
}
template void pack(Matrix<const bf16>, const PackedOrders&, Matrix<bf16>, const bf16*);
template void pack(Matrix<const bf16>, const PackedOrders&, Matrix<float>, const bf16*);
template void unpack(Matrix<const bf16>, const PackedOrders&, Matrix<bf16>, int64_t);
template void unpack(Matrix<const float>, const PackedOrders&, Matrix<bf16>, int64_t);

void narrow(Vector<const int64_t> from, Vector<int32_t> to) {
  narrow_kernel<<<static_cast<unsigned>(hopper::ceil_div(to.size, kThreads)), kThreads>>>(from, to);
  hopper::check(cudaGetLastError(), "narrowing labels");
}

}  // namespace coda::bench
