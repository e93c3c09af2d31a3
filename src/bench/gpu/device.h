// Memory, events and random operands on the GPU.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "coda/gpu.h"
#include "coda/tensor.h"

namespace coda::bench {

/// Throws DeviceError with CUDA's own words.
void check_cuda(cudaError_t error, const char* what);

/// Memory of the current device, not initialised.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);

  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* data) const { cudaFree(data); }
  };
  std::unique_ptr<void, Free> data_;
  int64_t bytes_ = 0;
};

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "the work on the stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream) { check_cuda(cudaEventRecord(event_, stream.get()), "cudaEventRecord"); }
  /// Seconds from this one to the later one, once that has happened.
  double seconds_to(const Event& later) const;

 private:
  cudaEvent_t event_ = nullptr;
};

template <class T>
void upload(const std::vector<T>& values, T* device) {
  check_cuda(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
}

/// The given rows of a matrix on the device, one after another.
template <class T>
std::vector<std::remove_const_t<T>> download_rows(const Matrix<T>& x, const std::vector<int64_t>& rows) {
  std::vector<std::remove_const_t<T>> values(rows.size() * static_cast<size_t>(x.cols));
  auto* to = values.data();
  for (const int64_t row : rows) {
    check_cuda(cudaMemcpy(to, x.row(row), static_cast<size_t>(x.cols) * sizeof(T), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    to += x.cols;
  }
  return values;
}
/// The given columns of it: [x.rows, number of columns].
template <class T>
std::vector<std::remove_const_t<T>> download_columns(const Matrix<T>& x, const std::vector<int64_t>& cols) {
  std::vector<std::remove_const_t<T>> values(cols.size() * static_cast<size_t>(x.rows));
  for (size_t i = 0; i < cols.size(); ++i)
    check_cuda(cudaMemcpy2D(values.data() + i, cols.size() * sizeof(T), x.data + cols[i],
                            static_cast<size_t>(x.stride) * sizeof(T), sizeof(T), static_cast<size_t>(x.rows),
                            cudaMemcpyDeviceToHost),
               "cudaMemcpy2D");
  return values;
}

/// Normal random numbers for large operands: a card draws more power over them than over zeros.
class RandomOperands {
 public:
  RandomOperands();
  /// count numbers of this standard deviation. They repeat, but no two rows of a matrix are the same. T: bf16 or float.
  template <class T>
  void fill(T* device, int64_t count, double deviation);
  std::mt19937_64& generator() { return generator_; }

 private:
  std::mt19937_64 generator_{1};
  std::vector<float> normal_;
};

}  // namespace coda::bench
