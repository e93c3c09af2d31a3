// AdamW on a GPU. adamw moves 30 bytes an element (reads master, gradient and two moments, writes three and a bf16) and
// is bound by that; add_squares likewise by what it reads.
#include "hopper/optimizer.h"

#include "hopper/launch.h"

namespace coda::hopper {

namespace {

constexpr int kThreads = 256;
constexpr int kParts = static_cast<int>(kSquaresWorkspace / int64_t{sizeof(double)});

/// Sum of one value per thread, as a tree; in thread 0.
__device__ double sum_of_block(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

/// Block i takes rows i, i + kParts, … where rows are many, or every row's i-th run of kThreads columns, i-th plus
/// kParts, ….
__global__ void __launch_bounds__(kThreads) squares_kernel(Matrix<const float> x, double* parts) {
  const int64_t runs = ceil_div(x.cols, kThreads), all = runs * x.rows;
  double sum = 0;
#pragma unroll 4
  for (int64_t run = blockIdx.x; run < all; run += kParts) {
    const int64_t column = run % runs * kThreads + threadIdx.x;
    const double value = column < x.cols ? static_cast<double>(x(run / runs, column)) : 0;
    sum += value * value;
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const double* parts, double* sum) {
  double mine = 0;
  for (int i = threadIdx.x; i < kParts; i += kThreads) mine += parts[i];
  mine = sum_of_block(mine);
  if (threadIdx.x == 0) *sum += mine;
}

__global__ void clip_kernel(const double* sum_of_squares, double clip, double* norm, llama::AdamWStep* step) {
  *norm = sqrt(*sum_of_squares);
  const double scale = clip > 0 ? fmin(1.0, clip / (*norm + 1e-6)) : 1.0;
  step->gradient_scale = isfinite(*norm) ? static_cast<float>(scale) : __int_as_float(0x7fffffff);
}

/// The elements of a row that a thread updates.
constexpr int kRun = 4;

template <bool kVectors>
__device__ __forceinline__ void load_run(const float* p, int count, float (&x)[kRun]) {
  if constexpr (kVectors) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    for (int i = 0; i < kRun; ++i) x[i] = i < count ? p[i] : 0;
  }
}
template <bool kVectors>
__device__ __forceinline__ void store_run(float* p, int count, const float (&x)[kRun]) {
  if constexpr (kVectors) {
    *reinterpret_cast<float4*>(p) = {x[0], x[1], x[2], x[3]};
  } else {
    for (int i = 0; i < kRun; ++i)
      if (i < count) p[i] = x[i];
  }
}
template <bool kVectors>
__device__ __forceinline__ void store_run(bf16* p, int count, const float (&x)[kRun]) {
  if constexpr (kVectors) {
    *reinterpret_cast<ushort4*>(p) = {bf16(x[0]).bits, bf16(x[1]).bits, bf16(x[2]).bits, bf16(x[3]).bits};
  } else {
    for (int i = 0; i < kRun; ++i)
      if (i < count) p[i] = bf16(x[i]);
  }
}

template <bool kVectors>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ AdamWParameter p, const llama::AdamWStep* of_step) {
  const llama::AdamWStep step = *of_step;
  if (isnan(step.gradient_scale)) return;
  const float decay = p.decays ? step.decay : 1.f, rest1 = 1.f - step.beta1, rest2 = 1.f - step.beta2;
  const int64_t runs = ceil_div(p.master.cols, kRun), all = runs * p.master.rows;
  for (int64_t run = int64_t{blockIdx.x} * kThreads + threadIdx.x; run < all; run += int64_t{gridDim.x} * kThreads) {
    const int64_t row = run / runs, column = run % runs * kRun;
    const int count = static_cast<int>(min(int64_t{kRun}, p.master.cols - column));
    float w[kRun], m[kRun], v[kRun], g[kRun];
    load_run<kVectors>(p.master.row(row) + column, count, w);
    load_run<kVectors>(p.moment1.row(row) + column, count, m);
    load_run<kVectors>(p.moment2.row(row) + column, count, v);
    load_run<kVectors>(p.gradient.row(row) + column, count, g);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float scaled = g[i] * step.gradient_scale;
      m[i] = step.beta1 * m[i] + rest1 * scaled;
      v[i] = step.beta2 * v[i] + rest2 * (scaled * scaled);
      w[i] = w[i] * decay - step.step_size * (m[i] / (sqrtf(v[i]) * step.inv_sqrt_correction + step.eps));
    }
    store_run<kVectors>(p.moment1.row(row) + column, count, m);
    store_run<kVectors>(p.moment2.row(row) + column, count, v);
    store_run<kVectors>(p.master.row(row) + column, count, w);
    if (p.weight.data == nullptr) continue;
    if (p.gamma.data != nullptr) {
      float gamma[kRun];
      load_run<kVectors>(p.gamma.data + column, count, gamma);
#pragma unroll
      for (int i = 0; i < kRun; ++i) w[i] = w[i] * gamma[i];
    }
    store_run<kVectors>(p.weight.row(row) + column, count, w);
  }
}

template <class T>
bool in_vectors(const Matrix<T>& x) {
  return reinterpret_cast<uintptr_t>(x.data) % (kRun * sizeof(T)) == 0 && x.cols % kRun == 0 && x.stride % kRun == 0;
}

template <class T, class U>
void check_shape(const char* name, const Matrix<T>& x, const Matrix<U>& like) {
  if (x.rows != like.rows || x.cols != like.cols)
    throw OperandError(name, std::to_string(x.rows) + "x" + std::to_string(x.cols),
                       std::to_string(like.rows) + "x" + std::to_string(like.cols));
}
void check_size(const char* name, const Vector<const float>& x, int64_t size) {
  if (x.size != size) throw OperandError(name, std::to_string(x.size) + " values", std::to_string(size));
}

}  // namespace

void add_squares(const Gpu& gpu, Matrix<const float> x, double* sum) {
  if (gpu.workspace_bytes() < kSquaresWorkspace)
    throw OperandError("workspace", std::to_string(gpu.workspace_bytes()) + " bytes",
                       std::to_string(kSquaresWorkspace));
  if (x.rows == 0 || x.cols == 0) return;
  double* parts = static_cast<double*>(gpu.workspace());
  launch(gpu, "add_squares", squares_kernel, dim3(kParts), dim3(kThreads), x, parts);
  launch(gpu, "add_squares", add_parts_kernel, dim3(1), dim3(kThreads), static_cast<const double*>(parts), sum);
}

void clip_gradients(const Gpu& gpu, const double* sum_of_squares, double clip, double* norm, llama::AdamWStep* step) {
  launch(gpu, "clip_gradients", clip_kernel, dim3(1), dim3(1), sum_of_squares, clip, norm, step);
}

void adamw(const Gpu& gpu, const AdamWParameter& parameter, const llama::AdamWStep* step) {
  const AdamWParameter& p = parameter;
  check_shape("moment1", p.moment1, p.master);
  check_shape("moment2", p.moment2, p.master);
  check_shape("gradient", p.gradient, p.master);
  if (p.weight.data != nullptr) check_shape("weight", p.weight, p.master);
  if (p.gamma.data != nullptr) check_size("gamma", p.gamma, p.master.cols);
  if (p.master.rows == 0 || p.master.cols == 0) return;
  const bool vectors = in_vectors(p.master) && in_vectors(p.moment1) && in_vectors(p.moment2) &&
                       in_vectors(p.gradient) && in_vectors(p.weight) &&
                       reinterpret_cast<uintptr_t>(p.gamma.data) % (kRun * sizeof(float)) == 0;
  const int64_t blocks = ceil_div(ceil_div(p.master.cols, kRun) * p.master.rows, kThreads);
  launch(gpu, "adamw", vectors ? adamw_kernel<true> : adamw_kernel<false>,
         dim3(static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{gpu.multiprocessors()} * 64))), dim3(kThreads), p,
         step);
}

}  // namespace coda::hopper
