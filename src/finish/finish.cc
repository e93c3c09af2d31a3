#include "coda/finish.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "finish/check.h"

namespace coda {

namespace {

constexpr int64_t kColumns = 256;  // handled together: slots are read along their rows

/// out[i] = f(Σ_slots partial[slot, i]).
template <class F>
void finish_sums(Cpu& cpu, Matrix<const float> partial, Vector<float> out, F f) {
  detail::check_finish(partial, out);
  cpu.parallel_for((out.size + kColumns - 1) / kColumns, [&](int64_t block, int) {
    const int64_t first = block * kColumns, count = std::min(kColumns, out.size - first);
    double sums[kColumns] = {};
    for (int64_t slot = 0; slot < partial.rows; ++slot) {
      const float* row = partial.row(slot) + first;
      for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<double>(row[i]);
    }
    for (int64_t i = 0; i < count; ++i) out[first + i] = static_cast<float>(f(sums[i]));
  });
}

}  // namespace

void inv_rms(Cpu& cpu, Matrix<const float> sum_sq, int64_t width, double eps, Vector<float> out) {
  finish_sums(cpu, sum_sq, out, [=](double sum) { return 1 / std::sqrt(sum / static_cast<double>(width) + eps); });
}

void mean_inv_std(Cpu& cpu, Matrix<const float> sum, Matrix<const float> sq_deviation, int64_t width, double eps,
                  Vector<float> mean, Vector<float> inv_std) {
  constexpr int64_t kSlot = detail::kMomentSlot;
  detail::check_moments(sum, sq_deviation, width, mean, inv_std);
  cpu.parallel_for((sum.cols + kColumns - 1) / kColumns, [&](int64_t block, int) {
    const int64_t first = block * kColumns, count = std::min(kColumns, sum.cols - first);
    double means[kColumns] = {}, squares[kColumns] = {};
    for (int64_t slot = 0; slot < sum.rows; ++slot)
      for (int64_t i = 0; i < count; ++i) means[i] += static_cast<double>(sum(slot, first + i));
    for (int64_t i = 0; i < count; ++i) means[i] /= static_cast<double>(width);
    for (int64_t slot = 0; slot < sum.rows; ++slot) {
      const double size = static_cast<double>(std::min(kSlot, width - slot * kSlot));
      for (int64_t i = 0; i < count; ++i) {
        const double off = static_cast<double>(sum(slot, first + i)) / size - means[i];
        squares[i] += static_cast<double>(sq_deviation(slot, first + i)) + size * off * off;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      mean[first + i] = static_cast<float>(means[i]);
      inv_std[first + i] = static_cast<float>(1 / std::sqrt(squares[i] / static_cast<double>(width) + eps));
    }
  });
}

void mean_dot(Cpu& cpu, Matrix<const float> dot, int64_t width, Vector<float> out) {
  finish_sums(cpu, dot, out, [=](double sum) { return sum / static_cast<double>(width); });
}

void total(Cpu& cpu, Matrix<const float> partial, Vector<float> out) {
  finish_sums(cpu, partial, out, [](double sum) { return sum; });
}

void log_sum_exp(Cpu& cpu, Matrix<const MaxSum> partial, Vector<float> out) {
  detail::check_finish(partial, out);
  cpu.parallel_for((out.size + kColumns - 1) / kColumns, [&](int64_t block, int) {
    const int64_t first = block * kColumns, count = std::min(kColumns, out.size - first);
    constexpr double kNone = -std::numeric_limits<double>::infinity();
    double top[kColumns], sums[kColumns] = {};
    std::fill_n(top, kColumns, kNone);
    for (int64_t slot = 0; slot < partial.rows; ++slot)
      for (int64_t i = 0; i < count; ++i) top[i] = std::max(top[i], static_cast<double>(partial(slot, first + i).max));
    for (int64_t slot = 0; slot < partial.rows; ++slot)
      for (int64_t i = 0; i < count; ++i) {
        const MaxSum& state = partial(slot, first + i);
        // exp(-inf - -inf) would be NaN; a slot that saw nothing adds nothing. A NaN maximum stays one.
        if (!(static_cast<double>(state.max) == kNone))
          sums[i] += static_cast<double>(state.sum) * std::exp(static_cast<double>(state.max) - top[i]);
      }
    for (int64_t i = 0; i < count; ++i) out[first + i] = static_cast<float>(top[i] + std::log(sums[i]));
  });
}

}  // namespace coda
