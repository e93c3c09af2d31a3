// Tensors of PyTorch as coda's matrices. Only its stable ABI is used: one binary serves every PyTorch from 2.11 on.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <string>

#include "coda/error.h"
#include "coda/tensor.h"

namespace coda::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
inline constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<bf16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;

/// A tensor of the device of `like`, row-major, not initialised. Not by torch::stable::new_empty, which boxes its arguments for the
/// dispatcher and takes twice as long.
inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  constexpr int64_t kMost = 4;
  const auto count = static_cast<int64_t>(sizes.size());
  STD_TORCH_CHECK(count <= kMost, "a tensor of ", count, " dimensions");
  std::array<int64_t, kMost> strides{};
  int64_t stride = 1;
  for (int64_t i = count; i-- > 0;) {
    strides[static_cast<size_t>(i)] = stride;
    stride *= std::max<int64_t>(1, sizes.begin()[i]);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(count, sizes.begin(), strides.data(),
                                                  torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                                  device_type, like.get_device_index(), &made));
  return Tensor(made);
}
template <class T>
Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return empty(like, sizes, kScalarType<T>);
}

inline std::string shape_of(const Tensor& x) {
  std::string text = "[";
  for (int64_t i = 0; i < x.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(x.size(i));
  return text + "]";
}

template <class T>
void check_type(const Tensor& x, const char* name) {
  if (x.scalar_type() != kScalarType<std::remove_const_t<T>>)
    throw OperandError(name, "of another type", "that of the activations");
}

/// A matrix whose columns are next to each other. Throws OperandError.
template <class T>
Matrix<T> matrix(const Tensor& x, const char* name) {
  check_type<T>(x, name);
  if (x.dim() != 2) throw OperandError(name, "of shape " + shape_of(x), "two dimensions");
  // Strides of dimensions of 1 or 0 say nothing, nor do those of a matrix without elements.
  if (x.numel() > 0 && x.size(1) > 1 && x.stride(1) != 1)
    throw OperandError(name, "of column stride " + std::to_string(x.stride(1)), "columns next to each other");
  const int64_t stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  return {static_cast<T*>(x.data_ptr()), x.size(0), x.size(1), stride};
}
template <class T>
Vector<T> vector(const Tensor& x, const char* name) {
  check_type<T>(x, name);
  if (x.numel() > 1 && !x.is_contiguous()) throw OperandError(name, "with gaps", "values next to each other");
  return {static_cast<T*>(x.data_ptr()), x.numel()};
}

}  // namespace coda::torch_ops
