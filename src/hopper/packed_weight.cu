// Bound by memory: packing reads and writes two or four bytes an element, unpacking reads a float and a weight and writes a gradient.
#include "llama/packed_weight.h"

#include "coda/gpu.h"
#include "hopper/launch.h"

namespace coda::llama {

namespace {

using hopper::ceil_div;

constexpr int kThreads = 128;
/// Columns that a thread has, next to each other.
constexpr int kRun = 4;

template <class T>
struct alignas(kRun * sizeof(T)) Run {
  T x[kRun];
};
template <bool kVectors, class T>
__device__ __forceinline__ Run<T> load(const T* p, int count) {
  if constexpr (kVectors) {
    return *reinterpret_cast<const Run<T>*>(p);
  } else {
    Run<T> run;
    for (int i = 0; i < kRun; ++i) run.x[i] = i < count ? p[i] : T(0.f);
    return run;
  }
}
template <bool kVectors, class T>
__device__ __forceinline__ void store(T* p, int count, const Run<T>& run) {
  if constexpr (kVectors)
    *reinterpret_cast<Run<T>*>(p) = run;
  else
    for (int i = 0; i < kRun; ++i)
      if (i < count) p[i] = run.x[i];
}

template <bool kVectors, class W, class G, class E>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Matrix<const W> plain, PackedRows rows, Vector<const G> gamma, Matrix<E> packed) {
  for (int64_t row = blockIdx.y; row < plain.rows; row += gridDim.y) {
    E* to = packed.row(rows.packed(row));
    for (int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun; col < plain.cols;
         col += int64_t{gridDim.x} * kThreads * kRun) {
      const int count = static_cast<int>(min(int64_t{kRun}, plain.cols - col));
      const Run<W> w = load<kVectors>(plain.row(row) + col, count);
      Run<E> out;
      if (gamma.data == nullptr) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) out.x[i] = E(static_cast<float>(w.x[i]));
      } else {
        const Run<G> g = load<kVectors>(gamma.data + col, count);
#pragma unroll
        for (int i = 0; i < kRun; ++i) out.x[i] = E(static_cast<float>(w.x[i]) * static_cast<float>(g.x[i]));
      }
      store<kVectors>(to + col, count, out);
    }
  }
}

/// A thread has kRun columns of kUnpackRows rows.
template <bool kVectors, class W, class G>
__global__ void __launch_bounds__(kThreads)
    unpack_gradient_kernel(Matrix<const float> packed, PackedRows rows, Matrix<const W> plain, Vector<const G> gamma,
                           Matrix<W> d_plain, Matrix<float> d_gamma) {
  const int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun;
  if (col >= plain.cols) return;
  const int count = static_cast<int>(min(int64_t{kRun}, plain.cols - col));
  Run<G> g;
#pragma unroll
  for (int i = 0; i < kRun; ++i) g.x[i] = G(1.f);
  if (gamma.data != nullptr) g = load<kVectors>(gamma.data + col, count);
  const int64_t slots = unpack_slots(plain.rows);
  for (int64_t slot = blockIdx.y; slot < slots; slot += gridDim.y) {
    const int64_t end = min((slot + 1) * kUnpackRows, plain.rows);
    Run<float> sum{};
#pragma unroll 4
    for (int64_t row = slot * kUnpackRows; row < end; ++row) {
      const Run<float> d = load<kVectors>(packed.row(rows.packed(row)) + col, count);
      if (d_gamma.data != nullptr) {
        const Run<W> w = load<kVectors>(plain.row(row) + col, count);
#pragma unroll
        for (int i = 0; i < kRun; ++i) sum.x[i] = sum.x[i] + d.x[i] * static_cast<float>(w.x[i]);
      }
      if (d_plain.data != nullptr) {
        Run<W> out;
#pragma unroll
        for (int i = 0; i < kRun; ++i) out.x[i] = W(d.x[i] * static_cast<float>(g.x[i]));
        store<kVectors>(d_plain.row(row) + col, count, out);
      }
    }
    if (d_gamma.data != nullptr) store<kVectors>(d_gamma.row(slot) + col, count, sum);
  }
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    pack_vector_kernel(Vector<const W> plain, PackedRows rows, int64_t n, Vector<float> packed) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads)
    packed.data[rows.packed(i)] = static_cast<float>(plain.data[i % plain.size]);
}

/// A thread has an element of d_plain: heads are few.
template <class W>
__global__ void __launch_bounds__(kThreads)
    unpack_vector_gradient_kernel(Vector<const float> packed, PackedRows rows, int64_t n, Vector<W> d_plain) {
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < d_plain.size; j += int64_t{gridDim.x} * kThreads) {
    float sum = 0.f;
    for (int64_t i = j; i < n; i += d_plain.size) sum += packed.data[rows.packed(i)];
    d_plain.data[j] = W(sum);
  }
}

template <class T>
bool in_runs(const Matrix<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % (kRun * sizeof(T)) == 0 && x.cols % kRun == 0 && x.stride % kRun == 0;
}
template <class T>
bool in_runs(const Vector<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % (kRun * sizeof(T)) == 0;
}
dim3 grid(int64_t cols, int64_t rows) {
  return {static_cast<unsigned>(ceil_div(cols, int64_t{kThreads} * kRun)),
          static_cast<unsigned>(std::min<int64_t>(rows, 65535))};
}

}  // namespace

template <class W, class G>
void pack(const Gpu& gpu, Matrix<const W> plain, const PackedRows& rows, Vector<const G> gamma, Matrix<bf16> packed) {
  if (plain.rows == 0 || plain.cols == 0) return;
  const bool vectors = in_runs(plain) && in_runs(gamma) && in_runs(packed);
  hopper::launch(gpu, "pack", vectors ? pack_kernel<true, W, G, bf16> : pack_kernel<false, W, G, bf16>,
                 grid(plain.cols, plain.rows), dim3(kThreads), plain, rows, gamma, packed);
}

template <class W, class G>
void unpack_gradient(const Gpu& gpu, Matrix<const float> packed, const PackedRows& rows, Matrix<const W> plain,
                     Vector<const G> gamma, Matrix<W> d_plain, Matrix<float> d_gamma) {
  if (plain.rows == 0 || plain.cols == 0) return;
  const bool vectors = in_runs(packed) && in_runs(plain) && in_runs(gamma) && in_runs(d_plain) && in_runs(d_gamma);
  hopper::launch(
      gpu, "unpack_gradient", vectors ? unpack_gradient_kernel<true, W, G> : unpack_gradient_kernel<false, W, G>,
      grid(plain.cols, unpack_slots(plain.rows)), dim3(kThreads), packed, rows, plain, gamma, d_plain, d_gamma);
}

template <class W>
void pack_vector(const Gpu& gpu, Vector<const W> plain, const PackedRows& rows, int64_t n, Vector<float> packed) {
  if (n == 0) return;
  hopper::launch(gpu, "pack_vector", pack_vector_kernel<W>, grid(n, 1), dim3(kThreads), plain, rows, n, packed);
}

template <class W>
void unpack_vector_gradient(const Gpu& gpu, Vector<const float> packed, const PackedRows& rows, int64_t n,
                            Vector<W> d_plain) {
  if (d_plain.size == 0) return;
  hopper::launch(gpu, "unpack_vector_gradient", unpack_vector_gradient_kernel<W>, grid(d_plain.size, 1), dim3(kThreads),
                 packed, rows, n, d_plain);
}

#define CODA_PACKED_VECTOR(W)                                                                        \
  template void pack_vector(const Gpu&, Vector<const W>, const PackedRows&, int64_t, Vector<float>); \
  template void unpack_vector_gradient(const Gpu&, Vector<const float>, const PackedRows&, int64_t, Vector<W>);
CODA_PACKED_VECTOR(float)
CODA_PACKED_VECTOR(bf16)

#define CODA_PACKED_WEIGHT(W, G)                                                                                      \
  template void pack(const Gpu&, Matrix<const W>, const PackedRows&, Vector<const G>, Matrix<bf16>);                  \
  template void unpack_gradient(const Gpu&, Matrix<const float>, const PackedRows&, Matrix<const W>, Vector<const G>, \
                                Matrix<W>, Matrix<float>);
CODA_PACKED_WEIGHT(float, float)
CODA_PACKED_WEIGHT(float, bf16)
CODA_PACKED_WEIGHT(bf16, float)
CODA_PACKED_WEIGHT(bf16, bf16)

}  // namespace coda::llama
