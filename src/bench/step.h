// A training step: how long, how much of it is in products, attention and the optimizer, and how much memory it adds.
#pragma once
#include <string>
#include <vector>

#include "contest.h"
#include "library.h"
#include "llama/model.h"

namespace coda::bench {

struct StepReport {
  Time step;              // forward, backward, update
  Time forward_backward;  // of one batch
  Time attention;         // forward and backward of all layers
  Time products;          // OpenBLAS' plain products of all the step's shapes, nothing else
  double product_flops;   // of those
  int64_t bytes_before;   // resident before the first step
  int64_t bytes_of_step;  // that the first two steps add at their peak
  int64_t tokens, parameters;
};

/// Fresh weights, random tokens: rows of seq tokens, each a document of its own.
StepReport bench_step(Cpu& cpu, OpenBlas& openblas, const llama::Config& config, llama::Dtype dtype, int64_t rows,
                      int64_t seq, const Rounds& rounds);

}  // namespace coda::bench
