// Models on a GPU, for code that is linked with and without the GPU half.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "llama/gpu_memory.h"
#include "llama/model.h"

namespace coda::llama {

// Defined in the GPU half: null where it is not linked in.

/// Throws DeviceError that says why the calling thread's current GPU is none that coda runs on.
[[gnu::weak]] void check_gpu();
/// A model in bf16 on that GPU, with fp32 masters, gradients and moments there. Throws DeviceError where it has not the memory.
[[gnu::weak]] std::unique_ptr<Model> model_on_gpu(const Config& config);

/// Throws DeviceError with one line if that GPU has not the memory for training steps of this size: what they take, what is free, and
/// what would fit.
[[gnu::weak]] void check_gpu_memory(const Config& config, const GpuStep& step);

/// A model on that GPU, and UsageError where why_no_gpu() has a reason. With a step, nothing is allocated where that would not fit.
std::unique_ptr<Model> make_model_on_gpu(const Config& config, std::optional<GpuStep> step = {});

/// Nothing if this program has a GPU half and there is a GPU for it; otherwise what is missing.
std::optional<std::string> why_no_gpu();

}  // namespace coda::llama
