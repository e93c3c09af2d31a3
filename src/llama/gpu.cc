#include "gpu.h"

#include "coda/error.h"
#include "coda/gpu.h"

namespace coda::llama {

std::unique_ptr<Model> make_model_on_gpu(const Config& config, std::optional<GpuStep> step) {
  if (const auto missing = why_no_gpu()) throw UsageError("--device is cuda, but " + *missing);
  if (step) check_gpu_memory(config, *step);
  return model_on_gpu(config);
}

std::optional<std::string> why_no_gpu() {
  // volatile: g++ 12 folds the comparison of a declared function with null, weak or not.
  void (*volatile check)() = &check_gpu;
  if (check == nullptr) return "this coda was built without its GPU half: `make cuda` builds it";
  try {
    check();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return std::nullopt;
}

}  // namespace coda::llama
