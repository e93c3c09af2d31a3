// The packed order of pairs, and its exact inverse.
//
// Partners sit in blocks of 8: rows 16k…16k+7 of packed are rows 8k…8k+7 of first, rows 16k+8…16k+15 the same rows of
// second. For SwiGLU first and second are the gate and up weights; for half-split RoPE the two halves of a head.
#pragma once
#include <algorithm>
#include <string>

#include "coda/error.h"
#include "coda/tensor.h"

namespace coda {

namespace detail {

inline constexpr int64_t kPairBlock = 8;

template <class A, class B, class C>
void check_interleave(const Matrix<A>& first, const Matrix<B>& second, const Matrix<C>& packed) {
  const auto shape = [](const auto& m) { return std::to_string(m.rows) + "x" + std::to_string(m.cols); };
  if (first.rows % kPairBlock != 0)
    throw OperandError("first", std::to_string(first.rows) + " rows",
                       "a multiple of 8: partners are packed in blocks of 8");
  if (second.rows != first.rows || second.cols != first.cols)
    throw OperandError("second", shape(second), "the " + shape(first) + " of first");
  if (packed.rows != 2 * first.rows || packed.cols != first.cols)
    throw OperandError("packed", shape(packed), "twice the rows of first, " + shape(first));
}

}  // namespace detail

/// The row of packed that holds row i of first, or of second.
constexpr int64_t packed_row(int64_t i, bool of_second) {
  return i / detail::kPairBlock * 2 * detail::kPairBlock + i % detail::kPairBlock +
         (of_second ? detail::kPairBlock : 0);
}

/// first, second [P, K] to packed [2P, K], P a multiple of 8. Throws OperandError.
template <class T>
void interleave(Matrix<const T> first, Matrix<const T> second, Matrix<T> packed) {
  detail::check_interleave(first, second, packed);
  for (int64_t i = 0; i < first.rows; ++i) {
    std::copy_n(first.row(i), first.cols, packed.row(packed_row(i, false)));
    std::copy_n(second.row(i), second.cols, packed.row(packed_row(i, true)));
  }
}

/// The inverse of interleave.
template <class T>
void deinterleave(Matrix<const T> packed, Matrix<T> first, Matrix<T> second) {
  detail::check_interleave(first, second, packed);
  for (int64_t i = 0; i < first.rows; ++i) {
    std::copy_n(packed.row(packed_row(i, false)), first.cols, first.row(i));
    std::copy_n(packed.row(packed_row(i, true)), second.cols, second.row(i));
  }
}

}  // namespace coda
