// Calls of the CUDA runtime: their errors, and the device that they are made on.
#pragma once
#include <cuda_runtime_api.h>

#include "coda/gpu.h"

namespace coda::hopper {

/// Throws DeviceError with what CUDA says.
inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw DeviceError(std::string(call) + ": " + cudaGetErrorString(error));
}

/// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    int now = before_;
    if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

}  // namespace coda::hopper
