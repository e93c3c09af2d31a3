#include "hopper/device_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "coda/gpu.h"

namespace coda::hopper {

namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw DeviceError(fmt::format("{}: CUDA says {}", what, cudaGetErrorString(result)));
}

}  // namespace

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes)); error != cudaSuccess) {
    cudaGetLastError();  // or the next call would report it
    const std::string said = fmt::format("{:.3f} GB of the GPU's memory: CUDA says {}",
                                         1e-9 * static_cast<double>(bytes), cudaGetErrorString(error));
    if (error != cudaErrorMemoryAllocation) throw DeviceError(said);
    const FreeMemory memory = free_memory();
    throw OutOfMemory(fmt::format("{}; {:.3f} GB are free of {:.3f}", said, 1e-9 * static_cast<double>(memory.free),
                                  1e-9 * static_cast<double>(memory.total)));
  }
  data_ = static_cast<std::byte*>(data);
}
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
DeviceMemory::~DeviceMemory() {
  cudaFree(data_);
}

void DeviceMemory::fill(std::byte value) {
  if (bytes_ == 0) return;
  check(cudaMemset(data_, std::to_integer<int>(value), static_cast<size_t>(bytes_)), "filling device memory");
  synchronize();
}
void DeviceMemory::copy_from(const std::byte* host) {
  check(cudaMemcpy(data_, host, static_cast<size_t>(bytes_), cudaMemcpyHostToDevice), "copying to the device");
  synchronize();  // a copy from pageable memory may return before it is there
}
void DeviceMemory::copy_to(std::byte* host) const {
  synchronize();
  check(cudaMemcpy(host, data_, static_cast<size_t>(bytes_), cudaMemcpyDeviceToHost), "copying from the device");
}

FreeMemory free_memory() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for the device's free memory");
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

void synchronize() {
  check(cudaDeviceSynchronize(), "waiting for the device");
}

}  // namespace coda::hopper
