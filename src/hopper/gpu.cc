#include "coda/gpu.h"

#include <fmt/format.h>

#include "device_guard.h"

namespace coda {

namespace {

std::string version(int number) {
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

}  // namespace

Gpu::Gpu(Stream stream, int device) : stream_(stream), device_(device) {
  int driver = 0, count = 0;
  hopper::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  if (driver == 0)
    throw DeviceError("no NVIDIA driver was found; coda's GPU engine needs one for CUDA " + version(CUDART_VERSION));
  if (driver < CUDART_VERSION / 1000 * 1000)
    throw DeviceError(
        fmt::format("the NVIDIA driver is for CUDA {}; coda's GPU engine needs one for CUDA {}.0 or newer",
                    version(driver), CUDART_VERSION / 1000));
  if (const cudaError_t error = cudaGetDeviceCount(&count); error == cudaErrorNoDevice || count == 0)
    throw DeviceError("no GPU was found; coda's GPU engine needs one of compute capability 9.0 (H100, H200)");
  if (device_ < 0) hopper::check(cudaGetDevice(&device_), "cudaGetDevice");
  if (device_ >= count) throw DeviceError(fmt::format("there is no GPU {}: {} were found", device_, count));
  cudaDeviceProp properties{};
  hopper::check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
  name_ = properties.name;
  if (properties.major != 9 || properties.minor != 0)
    throw DeviceError(
        fmt::format("GPU {}, {}, is of compute capability {}.{}; coda's GPU engine needs 9.0 (H100, H200)", device_,
                    name_, properties.major, properties.minor));
  multiprocessors_ = properties.multiProcessorCount;
}

void Gpu::set_workspace(void* data, int64_t bytes) {
  if (bytes < 0) throw OperandError("workspace", fmt::format("{} bytes", bytes), "0 or more");
  if (bytes > 0 && data == nullptr) throw OperandError("workspace", "null", fmt::format("memory for {} bytes", bytes));
  if (reinterpret_cast<uintptr_t>(data) % 256 != 0)
    throw OperandError("workspace", fmt::format("at address {}", data), "an address that is a multiple of 256");
  workspace_ = data;
  workspace_bytes_ = bytes;
}

}  // namespace coda
