// What the second stage refuses, on every engine.
#pragma once
#include <string>

#include "coda/error.h"
#include "coda/operands.h"

namespace coda::detail {

/// Columns of a slot of the partials that mean_inv_std takes.
inline constexpr int64_t kMomentSlot = 128;

template <class T>
void check_finish(const Matrix<const T>& partial, const Vector<float>& out) {
  if (partial.cols != out.size)
    throw OperandError("out", std::to_string(out.size) + " values", std::to_string(partial.cols));
}

inline void check_moments(const Matrix<const float>& sum, const Matrix<const float>& sq_deviation, int64_t width,
                          const Vector<float>& mean, const Vector<float>& inv_std) {
  const auto shape = [](const Matrix<const float>& x) { return std::to_string(x.rows) + "x" + std::to_string(x.cols); };
  if (sum.rows != (width + kMomentSlot - 1) / kMomentSlot)
    throw OperandError("sum", std::to_string(sum.rows) + " slots",
                       "one for every 128 of " + std::to_string(width) + " columns");
  if (sq_deviation.rows != sum.rows || sq_deviation.cols != sum.cols)
    throw OperandError("sq_deviation", shape(sq_deviation), "the " + shape(sum) + " of sum");
  if (mean.size != sum.cols)
    throw OperandError("mean", std::to_string(mean.size) + " values", std::to_string(sum.cols));
  if (inv_std.size != sum.cols)
    throw OperandError("inv_std", std::to_string(inv_std.size) + " values", std::to_string(sum.cols));
}

}  // namespace coda::detail
