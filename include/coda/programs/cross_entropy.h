// The vocabulary loss: logits l = r ⊙ (h W̃lmᵀ) of a chunk of tokens, their log-sum-exp, and its gradient.
//
// Kept logits are stored relative to the maximum of their row's group of 128 columns, and the log-sum-exp takes the stored
// value, so that the gradient sums to zero over a row: with the log-sum-exp of unrounded logits a confident token's bf16
// gradient is 40 % wrong.
#pragma once
#include "coda/operands.h"

namespace coda {

/// The chunk's logits are stored, for CrossEntropyBackward over the stored tile.
struct KeepLogits {
  static constexpr bool value = true;
};
/// Only statistics leave the chip; CrossEntropyBackward runs on a second product.
struct RecomputeLogits {
  static constexpr bool value = false;
};

template <class S = Tensors<bf16>, class Keep = KeepLogits>
struct CrossEntropy {
  In<S, PerRow<float>> inv_rms;  // [M]
  In<S, PerRow<int32_t>> label;  // [M]
  Local<S, RowMax<float, 128>> group_max;
  Out<S, When<Keep, RowMax<float, 128>>> maxima;  // [V/128, M]
  Out<S, When<Keep, Tile<>>> relative_logits;     // [M, V]
  Out<S, RowLogSumExp<128>> log_sum_exp;          // [V/128, M]
  Out<S, RowSum<float, 128>> label_logit;         // [V/128, M]

  CODA_FN void measure(Real<S>& acc) {
    acc = inv_rms * acc;
    group_max = acc;
  }
  CODA_FN void operator()(Real<S> acc, At<S> at) {
    Real<S> logit = acc;
    if constexpr (Keep::value) {
      const auto relative = rounded<Element<S>>(acc - group_max);
      logit = relative + group_max;
      maxima = group_max;
      relative_logits = relative;
    }
    log_sum_exp = logit;
    label_logit = select(at.col == label, logit, 0.f);
  }
};

/// acc is a stored relative logit (KeepLogits, in place over the tile) or a product (RecomputeLogits).
/// dl = (exp(l − lse) − [col = label]) · d_loss.
template <class S = Tensors<bf16>, class Keep = KeepLogits>
struct CrossEntropyBackward {
  In<S, PerRow<float>> inv_rms;                  // [M]
  In<S, PerRow<int32_t>> label;                  // [M]
  In<S, PerRow<float>> log_sum_exp;              // [M]
  In<S, PerRow<float>> d_loss;                   // [M]  upstream gradient; 0 for a token that does not count
  In<S, When<Keep, RowMax<float, 128>>> maxima;  // [V/128, M]
  Out<S, Tile<>> d_logits;                       // [M, V]  times inv_rms
  Out<S, RowSum<float, 128>> dot;                // [V/128, M]  <dl, l>, for the norm in front

  CODA_FN void operator()(Real<S> acc, At<S> at) {
    Real<S> logit = acc;
    if constexpr (Keep::value)
      logit = acc + maxima;
    else
      logit = inv_rms * acc;
    const auto probability = exp(logit - log_sum_exp);
    const auto dl = (probability - select(at.col == label, Real<S>(1.f), 0.f)) * d_loss;
    d_logits = inv_rms * dl;
    dot = dl * logit;
  }
};

}  // namespace coda
