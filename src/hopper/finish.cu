// The second stage of partial reductions on a GPU: out[i] = f(slots of column i), in double, one rounding per result. Reads
// each partial once (the log-sum-exp and the moments twice, from the cache).
#include "coda/finish.h"

#include "finish/check.h"
#include "hopper/launch.h"
#include "hopper/slots.h"

namespace coda {

namespace {

using namespace hopper;  // slots.h

struct InvRms {
  double width, eps;
  __device__ double operator()(double sum) const { return 1 / sqrt(sum / width + eps); }
};
struct Mean {
  double width;
  __device__ double operator()(double sum) const { return sum / width; }
};
struct Total {
  __device__ double operator()(double sum) const { return sum; }
};

template <class F>
__global__ void __launch_bounds__(kColumns* kParts) sums_kernel(Matrix<const float> partial, Vector<float> out, F f) {
  const Part part(partial.rows, out.size);
  const double sum = sum_slots(part, [&](int64_t slot) { return static_cast<double>(partial(slot, part.column)); });
  if (part.stores(out.size)) out[part.column] = static_cast<float>(f(sum));
}

__global__ void __launch_bounds__(kColumns* kParts)
    moments_kernel(Matrix<const float> sum, Matrix<const float> sq_deviation, int64_t width, double eps,
                   Vector<float> mean, Vector<float> inv_std) {
  constexpr int64_t kSlot = detail::kMomentSlot;
  const Part part(sum.rows, sum.cols);
  const double all = static_cast<double>(width);
  const double centre =
      sum_slots(part, [&](int64_t slot) { return static_cast<double>(sum(slot, part.column)); }) / all;
  const double squares = sum_slots(part, [&](int64_t slot) {
    const double size = static_cast<double>(min(kSlot, width - slot * kSlot));
    const double off = static_cast<double>(sum(slot, part.column)) / size - centre;
    return static_cast<double>(sq_deviation(slot, part.column)) + size * off * off;
  });
  if (!part.stores(sum.cols)) return;
  mean[part.column] = static_cast<float>(centre);
  inv_std[part.column] = static_cast<float>(1 / sqrt(squares / all + eps));
}

__global__ void __launch_bounds__(kColumns* kParts)
    log_sum_exp_kernel(Matrix<const MaxSum> partial, Vector<float> out) {
  const Part part(partial.rows, out.size);
  const double all = log_sum_exp_of_slots(part, partial);
  if (part.stores(out.size)) out[part.column] = static_cast<float>(all);
}

template <class... Parameters, class... Arguments>
void finish(const Gpu& gpu, void (*kernel)(Parameters...), int64_t columns, const Arguments&... arguments) {
  if (columns == 0) return;
  hopper::launch(gpu, "the second stage of a reduction", kernel,
                 dim3(static_cast<unsigned>(ceil_div(columns, kColumns))), dim3(kColumns, kParts), arguments...);
}

template <class F>
void finish_sums(const Gpu& gpu, Matrix<const float> partial, Vector<float> out, F f) {
  detail::check_finish(partial, out);
  finish(gpu, sums_kernel<F>, out.size, partial, out, f);
}

}  // namespace

void inv_rms(const Gpu& gpu, Matrix<const float> sum_sq, int64_t width, double eps, Vector<float> out) {
  finish_sums(gpu, sum_sq, out, InvRms{static_cast<double>(width), eps});
}

void mean_inv_std(const Gpu& gpu, Matrix<const float> sum, Matrix<const float> sq_deviation, int64_t width, double eps,
                  Vector<float> mean, Vector<float> inv_std) {
  detail::check_moments(sum, sq_deviation, width, mean, inv_std);
  finish(gpu, moments_kernel, sum.cols, sum, sq_deviation, width, eps, mean, inv_std);
}

void mean_dot(const Gpu& gpu, Matrix<const float> dot, int64_t width, Vector<float> out) {
  finish_sums(gpu, dot, out, Mean{static_cast<double>(width)});
}

void total(const Gpu& gpu, Matrix<const float> partial, Vector<float> out) {
  finish_sums(gpu, partial, out, Total{});
}

void log_sum_exp(const Gpu& gpu, Matrix<const MaxSum> partial, Vector<float> out) {
  detail::check_finish(partial, out);
  finish(gpu, log_sum_exp_kernel, out.size, partial, out);
}

}  // namespace coda
