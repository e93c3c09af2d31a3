// What the optimizer does to a run of elements of one parameter, on SIMD lanes. Compiled once per instruction set.
#pragma once
#include <cstdint>

#include "coda/isa.h"
#include "coda/tensor.h"

namespace coda::llama {

/// AdamW's numbers for one step; see adamw_row.
struct AdamWStep {
  float gradient_scale;  // of clipping
  float decay;           // 1 − lr·weight_decay, 1 for vectors
  float beta1, beta2;
  float step_size;            // lr / (1 − beta1^t)
  float inv_sqrt_correction;  // 1 / sqrt(1 − beta2^t)
  float eps;
};

/// One row of a folded weight's gradient to that of the weight and of gamma, for n columns:
/// gradient = (add ? gradient : 0) + folded·gamma;  d_gamma += folded·weight. gradient may be folded itself.
template <class Isa>
void unfold_row(const float* folded, const float* weight, const float* gamma, bool add, float* gradient, float* d_gamma,
                int64_t n);

/// Σ x², in double over groups of 1024 elements.
template <class Isa>
double sum_of_squares(const float* x, int64_t n);

/// p = decay·p;  m = β1·m + (1−β1)·g;  v = β2·v + (1−β2)·g²;  p −= step_size·m / (sqrt(v)·inv_sqrt_correction + eps),
/// with g = gradient_scale·gradient. Decoupled weight decay, arXiv 1711.05101.
template <class Isa>
void adamw_row(float* p, float* m, float* v, const float* gradient, int64_t n, const AdamWStep& step);

/// out = weight·gamma, or weight where gamma is null, rounded once to E.
template <class Isa, class E>
void fold_row(const float* weight, const float* gamma, E* out, int64_t n);

struct OptimizerRows {
  decltype(&unfold_row<isa::generic>) unfold;
  decltype(&sum_of_squares<isa::generic>) squares;
  decltype(&adamw_row<isa::generic>) adamw;
  void (*fold_float)(const float*, const float*, float*, int64_t);
  void (*fold_bf16)(const float*, const float*, bf16*, int64_t);
};
/// The functions for the instruction set in use.
OptimizerRows optimizer_rows();

}  // namespace coda::llama
