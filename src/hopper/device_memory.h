// Memory of a GPU for those who want it simple: verification and tests. Every call waits for the device.
#pragma once
#include <cstddef>
#include <cstdint>

namespace coda::hopper {

/// Memory of the calling thread's current device, 256-byte aligned. All throw DeviceError with what CUDA says.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void fill(std::byte value);
  /// All of it, from or to the host.
  void copy_from(const std::byte* host);
  void copy_to(std::byte* host) const;

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
};

/// Waits for all work of the current device. Throws DeviceError if any of it has failed.
void synchronize();

}  // namespace coda::hopper
