// What every launch of the GPU engine's own kernels needs. For files that nvcc compiles.
#pragma once
#include <cuda_runtime.h>

#include "coda/gpu.h"

namespace coda::hopper {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw DeviceError(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// kernel<<<grid, block>>>(arguments…) on gpu's stream and device.
template <class... Parameters, class... Arguments>
void launch(const Gpu& gpu, const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            const Arguments&... arguments) {
  const CurrentDevice current(gpu.device());
  kernel<<<grid, block, 0, gpu.stream()>>>(arguments...);
  check_cuda(cudaGetLastError(), what);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace coda::hopper
