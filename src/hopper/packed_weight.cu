// Bound by memory: packing reads and writes two or four bytes an element, unpacking reads a float and a weight and writes a gradient.
#include "llama/packed_weight.h"

#include "coda/gpu.h"
#include "coda/hopper/warp.h"
#include "hopper/launch.h"

namespace coda::llama {

namespace {

using hopper::ceil_div;

constexpr int kThreads = 128;
/// Columns that a thread has, next to each other.
constexpr int kPackRun = 8, kUnpackRun = 4;
/// Rows that a thread has under way at a time. Their loads stand in front of their stores, which for the compiler may be to the same memory.
constexpr int kPackAtATime = 4, kUnpackAtATime = 8;
static_assert(kUnpackRows % kUnpackAtATime == 0);

template <int kRun, class T>
struct alignas(kRun * sizeof(T) < 16 ? kRun * sizeof(T) : 16) Run {
  T x[kRun];
};
template <bool kVectors, int kRun, class T>
__device__ __forceinline__ void load(Run<kRun, T>& run, const T* p, int count) {
  if constexpr (kVectors) {
    run = *reinterpret_cast<const Run<kRun, T>*>(p);
  } else {
    for (int i = 0; i < kRun; ++i) run.x[i] = i < count ? p[i] : T(0.f);
  }
}
/// Values to be stored as T, rounded once.
template <bool kVectors, int kRun, class T>
__device__ __forceinline__ void store(T* p, int count, const Run<kRun, float>& values) {
  if constexpr (!kVectors) {
    for (int i = 0; i < kRun; ++i)
      if (i < count) p[i] = T(values.x[i]);
  } else if constexpr (std::is_same_v<T, bf16>) {
    uint32_t word[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) word[i] = hopper::pack_bf16(values.x[2 * i], values.x[2 * i + 1]);
    if constexpr (kRun == 8)
      hopper::store_words(p, word[0], word[1], word[2], word[3]);
    else
      hopper::store_words(p, word[0], word[1]);
  } else {
    static_assert(kRun == 4);
    const auto word = [&](int i) { return __float_as_uint(values.x[i]); };
    hopper::store_words(p, word(0), word(1), word(2), word(3));
  }
}

/// gamma's values of a thread's columns; ones where there is none.
template <bool kVectors, int kRun, class G>
__device__ __forceinline__ Run<kRun, G> load_gamma(const Vector<const G>& gamma, int64_t col, int count) {
  Run<kRun, G> g;
#pragma unroll
  for (int i = 0; i < kRun; ++i) g.x[i] = G(1.f);
  if (gamma.data != nullptr) load<kVectors>(g, gamma.data + col, count);
  return g;
}

/// Where kCount rows from `first` on are in the packed weight, for all threads of a block: their divisions would take longer than the
/// memory. Rows behind `end` stand for the last one, so that everybody may read what everybody reads.
template <int kCount>
__device__ __forceinline__ void find_rows(const PackedRows& rows, int64_t first, int64_t end, int64_t (&at)[kCount]) {
  static_assert(kCount <= kThreads);
  __syncthreads();
  if (const int i = static_cast<int>(threadIdx.x); i < kCount) at[i] = rows.packed(min(first + i, end - 1));
  __syncthreads();
}

template <bool kVectors, class W, class G, class E>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(Matrix<const W> plain, PackedRows rows, Vector<const G> gamma, Matrix<E> packed) {
  __shared__ int64_t at[kPackAtATime];
  const int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPackRun;
  const int count = static_cast<int>(max(min(int64_t{kPackRun}, plain.cols - col), int64_t{0}));
  Run<kPackRun, G> g;
  if (count > 0) g = load_gamma<kVectors, kPackRun>(gamma, col, count);
  for (int64_t first = int64_t{blockIdx.y} * kPackAtATime; first < plain.rows;
       first += int64_t{gridDim.y} * kPackAtATime) {
    Run<kPackRun, W> w[kPackAtATime];
    if (count > 0) {
#pragma unroll
      for (int r = 0; r < kPackAtATime; ++r)
        load<kVectors>(w[r], plain.row(min(first + r, plain.rows - 1)) + col, count);
    }
    find_rows(rows, first, plain.rows, at);
    if (count == 0) continue;
#pragma unroll
    for (int r = 0; r < kPackAtATime; ++r) {
      Run<kPackRun, float> out;
#pragma unroll
      for (int i = 0; i < kPackRun; ++i) out.x[i] = static_cast<float>(w[r].x[i]) * static_cast<float>(g.x[i]);
      if (first + r < plain.rows) store<kVectors>(packed.row(at[r]) + col, count, out);
    }
  }
}

template <bool kVectors, class W, class G>
__global__ void __launch_bounds__(kThreads)
    unpack_gradient_kernel(Matrix<const float> packed, PackedRows rows, Matrix<const W> plain, Vector<const G> gamma,
                           Matrix<W> d_plain, Matrix<float> d_gamma, bool add) {
  __shared__ int64_t at[kUnpackRows];
  const int64_t col = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kUnpackRun;
  const int count = static_cast<int>(max(min(int64_t{kUnpackRun}, plain.cols - col), int64_t{0}));
  Run<kUnpackRun, G> g;
  if (count > 0) g = load_gamma<kVectors, kUnpackRun>(gamma, col, count);
  const int64_t slots = unpack_slots(plain.rows);
  for (int64_t slot = blockIdx.y; slot < slots; slot += gridDim.y) {
    const int64_t begin = slot * kUnpackRows, end = min(begin + kUnpackRows, plain.rows);
    find_rows(rows, begin, end, at);
    if (count == 0) continue;
    Run<kUnpackRun, float> sum{};
#pragma unroll 1
    for (int first = 0; begin + first < end; first += kUnpackAtATime) {
      Run<kUnpackRun, float> d[kUnpackAtATime];
      Run<kUnpackRun, W> w[kUnpackAtATime];
      const auto row = [&](int r) { return min(begin + first + r, end - 1); };
#pragma unroll
      for (int r = 0; r < kUnpackAtATime; ++r) load<kVectors>(d[r], packed.row(at[first + r]) + col, count);
      if (d_gamma.data != nullptr) {
#pragma unroll
        for (int r = 0; r < kUnpackAtATime; ++r) load<kVectors>(w[r], plain.row(row(r)) + col, count);
#pragma unroll
        for (int r = 0; r < kUnpackAtATime; ++r)
          if (begin + first + r < end)
#pragma unroll
            for (int i = 0; i < kUnpackRun; ++i) sum.x[i] = sum.x[i] + d[r].x[i] * static_cast<float>(w[r].x[i]);
      }
      if (d_plain.data == nullptr) continue;
      if (add) {
#pragma unroll
        for (int r = 0; r < kUnpackAtATime; ++r) load<kVectors>(w[r], d_plain.row(row(r)) + col, count);
      }
#pragma unroll
      for (int r = 0; r < kUnpackAtATime; ++r) {
        Run<kUnpackRun, float> out;
#pragma unroll
        for (int i = 0; i < kUnpackRun; ++i) {
          const float value = d[r].x[i] * static_cast<float>(g.x[i]);
          out.x[i] = add ? value + static_cast<float>(w[r].x[i]) : value;
        }
        if (begin + first + r < end) store<kVectors>(d_plain.row(begin + first + r) + col, count, out);
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

template <int kRun, class T>
constexpr uintptr_t kAlign = alignof(Run<kRun, std::remove_const_t<T>>);
template <int kRun, class T>
bool in_runs(const Matrix<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % kAlign<kRun, T> == 0 && x.cols % kRun == 0 && x.stride % kRun == 0;
}
template <int kRun, class T>
bool in_runs(const Vector<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % kAlign<kRun, T> == 0;
}
/// A thread for every run of columns, and a block for so many groups of rows.
dim3 grid(int64_t runs, int64_t groups) {
  return {static_cast<unsigned>(ceil_div(runs, int64_t{kThreads})),
          static_cast<unsigned>(std::min<int64_t>(groups, 65535))};
}

}  // namespace

template <class W, class G>
void pack(const Gpu& gpu, Matrix<const W> plain, const PackedRows& rows, Vector<const G> gamma, Matrix<bf16> packed) {
  if (plain.rows == 0 || plain.cols == 0) return;
  const bool vectors = in_runs<kPackRun>(plain) && in_runs<kPackRun>(gamma) && in_runs<kPackRun>(packed);
  hopper::launch(gpu, "pack", vectors ? pack_kernel<true, W, G, bf16> : pack_kernel<false, W, G, bf16>,
                 grid(ceil_div(plain.cols, int64_t{kPackRun}), ceil_div(plain.rows, int64_t{kPackAtATime})),
                 dim3(kThreads), plain, rows, gamma, packed);
}

template <class W, class G>
void unpack_gradient(const Gpu& gpu, Matrix<const float> packed, const PackedRows& rows, Matrix<const W> plain,
                     Vector<const G> gamma, Matrix<W> d_plain, Matrix<float> d_gamma, bool add) {
  if (plain.rows == 0 || plain.cols == 0) return;
  const bool vectors = in_runs<kUnpackRun>(packed) && in_runs<kUnpackRun>(plain) && in_runs<kUnpackRun>(gamma) &&
                       in_runs<kUnpackRun>(d_plain) && in_runs<kUnpackRun>(d_gamma);
  hopper::launch(gpu, "unpack_gradient",
                 vectors ? unpack_gradient_kernel<true, W, G> : unpack_gradient_kernel<false, W, G>,
                 grid(ceil_div(plain.cols, int64_t{kUnpackRun}), unpack_slots(plain.rows)), dim3(kThreads), packed,
                 rows, plain, gamma, d_plain, d_gamma, add && d_plain.data != nullptr);
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
                                Matrix<W>, Matrix<float>, bool);
CODA_PACKED_WEIGHT(float, float)
CODA_PACKED_WEIGHT(float, bf16)
CODA_PACKED_WEIGHT(bf16, float)
CODA_PACKED_WEIGHT(bf16, bf16)

}  // namespace coda::llama
