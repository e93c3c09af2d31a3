// What every launch of the GPU engine's own kernels needs. For files that nvcc compiles.
#pragma once
#include <cuda_runtime.h>

#include "device_guard.h"

namespace coda::hopper {

/// kernel<<<grid, block>>>(arguments…) on gpu's stream and device.
template <class... Parameters, class... Arguments>
void launch(const Gpu& gpu, const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            const Arguments&... arguments) {
  const DeviceGuard current(gpu.device());
  kernel<<<grid, block, 0, gpu.stream()>>>(arguments...);
  check(cudaGetLastError(), what);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace coda::hopper
