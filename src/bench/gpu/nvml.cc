#include "nvml.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>

#include "bench/shared_library.h"
#include "device.h"

namespace coda::bench {

namespace {

// nvml.h, which is not among the toolkit's required headers.
using Device = struct nvmlDevice_st*;
constexpr int kSuccess = 0;
constexpr int kSmClock = 1;

void check_nvml(int status, const char* call) {
  if (status != kSuccess) throw Error(fmt::format("{} failed with NVML's error {}", call, status));
}

}  // namespace

struct Nvml::Library {
  SharedLibrary file{"NVML", {"libnvidia-ml.so.1"}, "libnvidia-ml.so.1 comes with NVIDIA's driver"};
  int (*clock)(Device, int, unsigned*) = file.symbol<int(Device, int, unsigned*)>("nvmlDeviceGetClockInfo");
  int (*top_clock)(Device, int, unsigned*) = file.symbol<int(Device, int, unsigned*)>("nvmlDeviceGetMaxClockInfo");
  int (*power)(Device, unsigned*) = file.symbol<int(Device, unsigned*)>("nvmlDeviceGetPowerUsage");
  int (*power_limit)(Device, unsigned*) = file.symbol<int(Device, unsigned*)>("nvmlDeviceGetEnforcedPowerLimit");
  int (*driver)(char*, unsigned) = file.symbol<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
  int (*by_bus)(const char*, Device*) = file.symbol<int(const char*, Device*)>("nvmlDeviceGetHandleByPciBusId_v2");
  int (*init)() = file.symbol<int()>("nvmlInit_v2");
  int (*shutdown)() = file.symbol<int()>("nvmlShutdown");
  Device device = nullptr;
};

Nvml::Nvml(int device) {
  std::array<char, 32> bus{};
  check_cuda(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device), "cudaDeviceGetPCIBusId");
  try {
    auto library = std::make_unique<Library>();
    check_nvml(library->init(), "nvmlInit");
    library_ = std::move(library);
    check_nvml(library_->by_bus(bus.data(), &library_->device), "nvmlDeviceGetHandleByPciBusId");
    std::array<char, 96> version{};
    check_nvml(library_->driver(version.data(), static_cast<unsigned>(version.size())), "nvmlSystemGetDriverVersion");
    driver_ = version.data();
    unsigned milliwatts = 0, mhz = 0;
    if (library_->power_limit(library_->device, &milliwatts) == kSuccess) power_limit_watts_ = 1e-3 * milliwatts;
    if (library_->top_clock(library_->device, kSmClock, &mhz) == kSuccess) top_mhz_ = mhz;
  } catch (const Error& error) {
    trouble_ = error.what();
  }
}

Nvml::~Nvml() {
  if (library_) library_->shutdown();
}

CardState Nvml::state() const {
  CardState state;
  if (!trouble_.empty()) return state;
  unsigned mhz = 0, milliwatts = 0;
  if (library_->clock(library_->device, kSmClock, &mhz) == kSuccess) state.mhz = mhz;
  if (library_->power(library_->device, &milliwatts) == kSuccess) state.watts = 1e-3 * milliwatts;
  return state;
}

}  // namespace coda::bench
