// A case that coda and PyTorch both run, from the same tensors on the GPU.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu/device.h"
#include "coda/gpu.h"
#include "packed.h"

namespace coda::bench {

/// A matrix, or a vector as one row, in memory of its own on the GPU. Not initialised.
template <class T>
class DeviceTensor {
 public:
  DeviceTensor(int64_t rows, int64_t cols)
      : memory_(rows * cols * static_cast<int64_t>(sizeof(T))), rows_(rows), cols_(cols) {}
  explicit DeviceTensor(const std::vector<T>& values) : DeviceTensor(1, static_cast<int64_t>(values.size())) {
    upload(values, memory_.as<T>());
  }
  Matrix<T> matrix() const { return {memory_.as<T>(), rows_, cols_}; }
  Vector<T> vector() const { return {memory_.as<T>(), rows_ * cols_}; }

 private:
  DeviceMemory memory_;
  int64_t rows_, cols_;
};

/// PyTorch's tensors by name: packed, in its own layouts.
class Inputs {
 public:
  void add(std::string name, const void* data) { tensors_[std::move(name)] = data; }
  /// Throws Error where there is none of this name.
  template <class T>
  const T* get(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw Error("the case has no input " + name);
    return static_cast<const T*>(found->second);
  }
  Matrix<const bf16> matrix(const std::string& name, int64_t rows, int64_t cols) const {
    return {get<bf16>(name), rows, cols};
  }

 private:
  std::map<std::string, const void*> tensors_;
};

/// A matrix of the inputs in packed order, its columns times gamma where that is not null. Made when a case is opened, as a
/// model's weights are when the optimizer writes them.
template <class T = bf16>
DeviceTensor<T> packed(Matrix<const bf16> plain, const PackedOrders& order, const bf16* gamma = nullptr) {
  DeviceTensor<T> copy(plain.rows, plain.cols);
  pack(plain, order, copy.matrix(), gamma);
  return copy;
}

/// Rotary positions as the comparison has them, documents of 8192 tokens, and the turns of heads of head_dim in the first
/// `turned` of cols columns.
struct Rotation {
  DeviceTensor<int32_t> position;             // [M]
  DeviceTensor<float> turns_high, turns_low;  // [cols/2]
};
Rotation rotation_of(int64_t tokens, int64_t cols, int64_t turned, int64_t head_dim);

class Case {
 public:
  virtual ~Case() = default;
  /// Enqueues one launch: nothing is allocated and nothing waits.
  virtual void run(const Gpu& gpu) = 0;
  /// Writes an output of the last launch, as PyTorch's tensor of this name has it, to the GPU's memory at out. Throws Error for a
  /// name that is no output.
  virtual void result(std::string_view name, void* out) const = 0;
};

/// Null where there is no such case. d: hidden size, or of the square cases the side.
std::unique_ptr<Case> make_product_case(std::string_view name, int64_t d, const Inputs& inputs);
std::unique_ptr<Case> make_block_case(std::string_view name, int64_t d, const Inputs& inputs);

inline constexpr int64_t kTokens = 16384, kVocab = 32768, kLossTokens = 4096;

[[noreturn]] inline void throw_no_output(std::string_view name) {
  throw Error("the case has no output " + std::string(name));
}

}  // namespace coda::bench
