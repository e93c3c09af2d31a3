// Memory of a GPU. Every call waits for the device: this is for what is made before the work, or looked at after it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "coda/gpu.h"
#include "coda/tensor.h"

namespace coda::hopper {

/// The device has not as much memory as was asked for.
class OutOfMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// Memory of the calling thread's current device, 256-byte aligned. All throw DeviceError with what CUDA says, the constructor
/// OutOfMemory that also says how much was asked for and how much is free.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void fill(std::byte value);
  /// All of it, from or to the host.
  void copy_from(const std::byte* host);
  void copy_to(std::byte* host) const;

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// A matrix that owns its memory, as coda::Buffer is on the host. Not initialised.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int64_t rows, int64_t cols)
      : memory_(rows * cols * static_cast<int64_t>(sizeof(T))), rows_(rows), cols_(cols) {}

  Matrix<T> matrix() { return {data(), rows_, cols_}; }
  Matrix<const T> matrix() const { return {data(), rows_, cols_}; }
  /// The first count rows.
  Matrix<T> top(int64_t count) { return {data(), count, cols_}; }
  /// The first count elements as a vector.
  Vector<T> vector(int64_t count) { return {data(), count}; }
  Vector<T> vector() { return vector(rows_ * cols_); }
  Vector<const T> vector() const { return {data(), rows_ * cols_}; }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DeviceMemory& memory() { return memory_; }

 private:
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

  DeviceMemory memory_;
  int64_t rows_ = 0, cols_ = 0;
};

/// Bytes of the current device that are free, of how many.
struct FreeMemory {
  int64_t free, total;
};
FreeMemory free_memory();

/// Waits for all work of the current device. Throws DeviceError if any of it has failed.
void synchronize();

}  // namespace coda::hopper
