// The vocabulary loss: logits l = f(r ⊙ (h W̃lmᵀ)) of a chunk of tokens, the statistics of each row that losses are made of,
// and the gradient from the losses' derivatives by these statistics. Losses themselves (coda/loss.h) are arithmetic on one row's
// statistics: label smoothing, z-loss, weights and ignored tokens need no program of their own.
//
// Kept logits are stored relative to the maximum of their row's group of 128 columns, and the statistics take the stored
// value, so that the gradient sums to zero over a row: with the log-sum-exp of unrounded logits a confident token's bf16
// gradient is 40 % wrong.
#pragma once
#include "coda/operands.h"
#include "coda/vjp.h"

namespace coda {

/// The chunk's logits are stored, for CrossEntropyBackward over the stored tile.
struct KeepLogits {
  static constexpr bool value = true;
};
/// Only statistics leave the chip; CrossEntropyBackward runs on a second product.
struct RecomputeLogits {
  static constexpr bool value = false;
};

/// f of the logits: none.
struct Uncapped {
  template <class T>
  CODA_FN T operator()(T x) const {
    return x;
  }
};
/// cap · tanh(x / cap), cap > 0 (Gemma 2, arXiv 2408.00118).
struct SoftCapped {
  float cap;

  template <class T>
  CODA_FN T operator()(T x) const {
    return cap * tanh(x * (1.f / cap));
  }
};

/// The sum of a row's logits is one of its statistics: label smoothing takes it.
struct WithLogitSum {
  static constexpr bool value = true;
};
struct WithoutLogitSum {
  static constexpr bool value = false;
};

/// A label outside [0, V) matches no column; whoever calls has checked them. What is kept is the logit before f.
template <class S = Tensors<bf16>, class Keep = KeepLogits, class Cap = Uncapped, class LogitSum = WithoutLogitSum>
struct CrossEntropy {
  Cap f;
  In<S, PerRow<float>> inv_rms;  // [M]
  In<S, PerRow<int32_t>> label;  // [M]
  Local<S, RowMax<float, 128>> group_max;
  Out<S, When<Keep, RowMax<float, 128>>> maxima;         // [V/128, M]
  Out<S, When<Keep, Tile<>>> relative_logits;            // [M, V]
  Out<S, RowLogSumExp<128>> log_sum_exp;                 // [V/128, M]
  Out<S, RowSum<float, 128>> label_logit;                // [V/128, M]
  Out<S, When<LogitSum, RowSum<float, 128>>> logit_sum;  // [V/128, M]  over the V columns, whatever the padding

  CODA_FN void measure(Real<S>& acc) {
    acc = inv_rms * acc;
    group_max = acc;
  }
  CODA_FN void operator()(Real<S> acc, At<S> at) {
    Real<S> x = acc;
    if constexpr (Keep::value) {
      const auto relative = rounded<Element<S>>(acc - group_max);
      x = relative + group_max;
      maxima = group_max;
      relative_logits = relative;
    }
    const Real<S> logit = f(x);
    log_sum_exp = logit;
    label_logit = select(at.col == label, logit, 0.f);
    logit_sum = logit;
  }
};

/// acc is a stored relative logit (KeepLogits, in place over the tile) or a product (RecomputeLogits). d_log_sum_exp,
/// d_label_logit and d_logit_sum are the loss's derivatives by the statistics of the row; all zero where a token does not
/// count:  dl = exp(l − lse)·d_log_sum_exp + [col = label]·d_label_logit + d_logit_sum.
template <class S = Tensors<bf16>, class Keep = KeepLogits, class Cap = Uncapped, class LogitSum = WithoutLogitSum>
struct CrossEntropyBackward {
  Cap f;
  In<S, PerRow<float>> inv_rms;                      // [M]
  In<S, PerRow<int32_t>> label;                      // [M]
  In<S, PerRow<float>> log_sum_exp;                  // [M]
  In<S, PerRow<float>> d_log_sum_exp;                // [M]
  In<S, PerRow<float>> d_label_logit;                // [M]
  In<S, When<LogitSum, PerRow<float>>> d_logit_sum;  // [M]
  In<S, When<Keep, RowMax<float, 128>>> maxima;      // [V/128, M]
  Out<S, Tile<>> d_logits;                           // [M, V]  by the logit before f, times inv_rms
  Out<S, RowSum<float, 128>> dot;  // [V/128, M]  of it, before inv_rms, and that logit: for the norm in front

  CODA_FN void operator()(Real<S> acc, At<S> at) {
    Real<S> x = acc;
    if constexpr (Keep::value)
      x = acc + maxima;
    else
      x = inv_rms * acc;
    const auto [logit, slope] = value_and_vjp(f, x, Real<S>(1.f));
    Real<S> dl = exp(logit - log_sum_exp) * d_log_sum_exp + select(at.col == label, Real<S>(d_label_logit), 0.f);
    if constexpr (LogitSum::value) dl = dl + d_logit_sum;
    const auto d_x = dl * slope;
    d_logits = inv_rms * d_x;
    dot = d_x * x;
  }
};

}  // namespace coda
