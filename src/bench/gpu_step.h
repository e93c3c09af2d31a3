// A training step on a GPU: how long, and how much memory.
#pragma once
#include <cstdint>

#include "contest.h"
#include "llama/config.h"

namespace coda::bench {

struct GpuStepReport {
  Time step;               // forward, backward, update
  Time forward_backward;   // of one batch
  double flops;            // of a step: products and causal attention, forward and backward, nothing made twice
  int64_t bytes_of_model;  // of the device: parameters, gradients, moments
  int64_t bytes;           // of the device, in all, after the steps
  int64_t tokens, parameters;
};

/// Fresh weights, random tokens: rows of seq tokens, each a document of its own; by wall clock, one step after the other. Throws
/// DeviceError. Defined in the GPU half: null where it is not linked in.
[[gnu::weak]] GpuStepReport bench_gpu_step(const llama::Config& config, int64_t rows, int64_t seq,
                                           const Rounds& rounds);

/// FLOPs of that: 6 for every weight of a product and token, and attention's 12·width·T/2 for every layer and token.
double step_flops(const llama::Config& config, int64_t rows, int64_t seq);

}  // namespace coda::bench
