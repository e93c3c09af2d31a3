// Memory of a matrix.
#pragma once
#include <cstdint>
#include <span>

#include "coda/tensor.h"
#include "cpu/memory.h"

namespace coda {

/// A matrix that owns its memory. Not initialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(int64_t rows, int64_t cols) : data_(cpu::allocate<T>(rows * cols)), rows_(rows), cols_(cols) {}

  Matrix<T> matrix() { return {data_.get(), rows_, cols_}; }
  Matrix<const T> matrix() const { return {data_.get(), rows_, cols_}; }
  /// The first count rows.
  Matrix<T> top(int64_t count) { return {data_.get(), count, cols_}; }
  Matrix<const T> top(int64_t count) const { return {data_.get(), count, cols_}; }
  /// The first count elements as a vector.
  Vector<T> vector(int64_t count) { return {data_.get(), count}; }
  Vector<const T> vector(int64_t count) const { return {data_.get(), count}; }
  Vector<T> vector() { return vector(rows_ * cols_); }
  Vector<const T> vector() const { return vector(rows_ * cols_); }
  std::span<T> span() { return {data_.get(), static_cast<size_t>(rows_ * cols_)}; }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

 private:
  cpu::Memory<T> data_;
  int64_t rows_ = 0, cols_ = 0;
};

}  // namespace coda
