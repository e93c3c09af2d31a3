// LayerNorm without a kernel of its own: y = ((h − μ)·r ⊙ gamma + beta) Wᵀ + b. Mean and scale of a row commute with a right-hand
// product as an RMSNorm's scale does, so they are applied one product after the one that made h:
//   y = r ⊙ (h W̃ᵀ − μ·col_sum) + bias,  W̃ = W ⊙ gamma,  col_sum[o] = Σ_k W̃[o, k],  bias = W·beta + b.
// col_sum is of W̃ as it is stored, rounded, so that the mean cancels. A mean that is c times the deviation costs log2(c) of the
// accumulator's 24 bits. The derivation is in docs/numerics.md.
#pragma once
#include "coda/programs/norm.h"

namespace coda {

/// h = acc + residual, and what coda::mean_inv_std makes mean and scale from: of every 128 columns the sum, and the squared
/// deviations from their own mean. A sum of squares would lose the variance where the mean is large.
template <class S = Tensors<bf16>>
struct ResidualMoments {
  In<S, Tile<>> residual;  // [M, N]
  Local<S, RowSum<float, 128>> group_sum;
  Local<S, RowSum<float, 128>> group_size;  // 128, or what is left at a row's end
  Out<S, Tile<>> h;                         // [M, N]
  Out<S, RowSum<float, 128>> sum;           // [N/128, M]  of h before it is rounded, as is the next
  Out<S, RowSum<float, 128>> sq_deviation;  // [N/128, M]

  CODA_FN void measure(Real<S>& acc) {
    acc = acc + residual;
    group_sum = acc;
    group_size = Real<S>(1.f);
  }
  CODA_FN void operator()(Real<S> acc) {
    const auto deviation = acc - group_sum / group_size;
    h = acc;
    sum = acc;
    sq_deviation = deviation * deviation;
  }
};

/// y = r ⊙ (acc − μ·col_sum) + bias, acc = h W̃ᵀ.
template <class S = Tensors<bf16>>
struct LayerNorm {
  In<S, PerRow<float>> mean;     // [M]
  In<S, PerRow<float>> inv_std;  // [M]  r = 1/sqrt(variance + eps)
  In<S, PerCol<float>> col_sum;  // [N]
  In<S, PerCol<float>> bias;     // [N]
  Out<S, Tile<>> y;              // [M, N]

  CODA_FN void operator()(Real<S> acc) { y = inv_std * (acc - mean * col_sum) + bias; }
};

/// A map over dL/dy: what the products of d_h and of the weight's gradient read, and the sums that they need.
template <class S = Tensors<bf16>>
struct LayerNormUpstream {
  In<S, PerRow<float>> mean;                // [M]
  In<S, PerRow<float>> inv_std;             // [M]
  In<S, PerCol<float>> col_sum;             // [N]
  In<S, PerCol<float>> bias;                // [N]
  In<S, Tile<>> y;                          // [M, N]  as the forward pass stored it
  Out<S, Tile<>> d_y;                       // [M, N]  times inv_std
  Out<S, RowSum<float, 128>> dot_col_sum;   // [N/128, M]  <dL/dy, col_sum>
  Out<S, RowSum<float, 128>> dot;           // [N/128, M]  <dL/dy, y − bias>
  Out<S, ColSum<float, 64>> d_bias;         // [M/64, N]
  Out<S, ColSum<float, 64>> mean_gradient;  // [M/64, N]  Σ_rows μ·r·dL/dy: CentredWeightGradient takes its total

  CODA_FN void operator()(Real<S> acc) {
    const auto scaled = inv_std * acc;
    d_y = scaled;
    dot_col_sum = acc * col_sum;
    dot = acc * (y - bias);
    d_bias = acc;
    mean_gradient = mean * scaled;
  }
};

/// acc = d_y' W̃ with d_y' = r ⊙ d_y:  d_h = acc − r·(t + r·s·(h − μ)) + d_residual,  t = (1/d) Σ d_y·col_sum,
/// s = (1/d) Σ d_y·(y − bias).
template <class S = Tensors<bf16>, class Stream = StreamJoins>
struct LayerNormBackward {
  In<S, PerRow<float>> mean;               // [M]
  In<S, PerRow<float>> inv_std;            // [M]
  In<S, PerRow<float>> mean_dot_col_sum;   // [M]  t
  In<S, PerRow<float>> mean_dot;           // [M]  s
  In<S, Tile<>> h;                         // [M, N]
  In<S, When<Stream, Tile<>>> d_residual;  // [M, N]
  Out<S, Tile<>> d_h;                      // [M, N]

  CODA_FN void operator()(Real<S> acc) {
    const auto d_norm = acc - inv_std * (mean_dot_col_sum + inv_std * mean_dot * (h - mean));
    if constexpr (Stream::value)
      d_h = d_norm + d_residual;
    else
      d_h = d_norm;
  }
};

/// acc = d_y'ᵀ h:  d_W̃ = Σ_rows d_y'·(h − μ) = acc − mean_gradient, one value per output of the layer.
template <class S = Tensors<bf16>>
struct CentredWeightGradient {
  In<S, PerRow<float>> mean_gradient;  // [outputs]
  Out<S, Tile<float>> d_weight;        // [outputs, d]

  CODA_FN void operator()(Real<S> acc) { d_weight = acc - mean_gradient; }
};

}  // namespace coda
