// RMSNorm without a kernel of its own. A row scale commutes with a right-hand product, so r = rsqrt(mean(h²) + eps) is
// applied one product after the one that made h; the norm's weight gamma is folded into that product's weight, or applied
// here (the paper's form, arXiv 2605.19269).
#pragma once
#include "coda/operands.h"

namespace coda {

/// gamma lives in the next product's weight: W̃ = W ⊙ gamma, by columns.
struct GammaFolded {
  static constexpr bool value = false;
};
/// gamma is an operand of the epilogue, and x = h ⊙ gamma is stored beside h for the next product.
struct GammaInEpilogue {
  static constexpr bool value = true;
  template <class T>
  static CODA_FN T weight(T gamma) {
    return gamma;
  }
};
/// The same where what is learnt is the weight's distance from 1 (Gemma): x = h ⊙ (1 + gamma). Folded, W̃ = W ⊙ (1 + gamma).
struct GammaPlusOneInEpilogue {
  static constexpr bool value = true;
  template <class T>
  static CODA_FN T weight(T gamma) {
    return 1.f + gamma;
  }
};

/// h = acc + residual: the residual stream, and the sum that its RMSNorm needs; the norm itself is applied one product later.
template <class S = Tensors<bf16>, class Gamma = GammaFolded>
struct Residual {
  In<S, Tile<>> residual;                   // [M, N]
  In<S, When<Gamma, PerCol<float>>> gamma;  // [N]
  Out<S, Tile<>> h;                         // [M, N]
  Out<S, When<Gamma, Tile<>>> x;            // [M, N]
  Out<S, RowSum<float, 128>> sum_sq;        // [N/128, M]  of h before it is rounded

  CODA_FN void operator()(Real<S> acc) {
    const auto sum = acc + residual;
    h = sum;
    if constexpr (Gamma::value) x = sum * Gamma::weight(Real<S>(gamma));
    sum_sq = sum * sum;
  }
};

/// The sum that the RMSNorm of a stored stream needs, where no product made it: a map over h.
template <class S = Tensors<bf16>>
struct SumOfSquares {
  Out<S, RowSum<float, 128>> sum_sq;  // [N/128, M]

  CODA_FN void operator()(Real<S> h) { sum_sq = h * h; }
};

/// y = r ⊙ acc: a normalised product that nothing follows.
template <class S = Tensors<bf16>>
struct RmsNorm {
  In<S, PerRow<float>> inv_rms;  // [M]
  Out<S, Tile<>> y;              // [M, N]

  CODA_FN void operator()(Real<S> acc) { y = inv_rms * acc; }
};

/// The stream's own gradient joins the norm's.
struct StreamJoins {
  static constexpr bool value = true;
};
/// Nothing but the norm read this part of the stream: the last norm, in front of the vocabulary.
struct StreamEnds {
  static constexpr bool value = false;
};

/// acc = d_y' W̃ with d_y' = r ⊙ d_y, where y = r ⊙ (h W̃ᵀ):  d_h = acc − r²·s·h + d_residual,  s = (1/d) Σ d_y·y.
/// With gamma in the epilogue acc = d_y' W, and  d_h = gamma ⊙ acc − r²·s·h + d_residual,  d_gamma = Σ_rows acc ⊙ h.
/// d_residual joins after the norm's Jacobian: with d_y = 0 it comes through unchanged.
template <class S = Tensors<bf16>, class Stream = StreamJoins, class Gamma = GammaFolded>
struct RmsNormBackward {
  In<S, PerRow<float>> inv_rms;                    // [M]
  In<S, PerRow<float>> mean_dot;                   // [M]  s
  In<S, Tile<>> h;                                 // [M, N]
  In<S, When<Stream, Tile<>>> d_residual;          // [M, N]
  In<S, When<Gamma, PerCol<float>>> gamma;         // [N]
  Out<S, Tile<>> d_h;                              // [M, N]
  Out<S, When<Gamma, ColSum<float, 64>>> d_gamma;  // [M/64, N]

  CODA_FN void operator()(Real<S> acc) {
    Real<S> d_x = acc;
    if constexpr (Gamma::value) {
      d_x = acc * Gamma::weight(Real<S>(gamma));
      d_gamma = acc * h;
    }
    const auto d_norm = d_x - inv_rms * inv_rms * mean_dot * h;
    if constexpr (Stream::value)
      d_h = d_norm + d_residual;
    else
      d_h = d_norm;
  }
};

/// acc = d_y'ᵀ h, the gradient of a folded weight W̃ = W ⊙ gamma: that of W and that of gamma. T: the element type of d_weight.
template <class S = Tensors<bf16>, class T = float>
struct FoldedWeightGradient {
  In<S, PerCol<float>> gamma;         // [N]
  In<S, Tile<>> weight;               // [M, N]  W
  Out<S, Tile<T>> d_weight;           // [M, N]
  Out<S, ColSum<float, 64>> d_gamma;  // [M/64, N]  coda::total adds the slots

  CODA_FN void operator()(Real<S> acc) {
    d_weight = acc * gamma;
    d_gamma = acc * weight;
  }
};

}  // namespace coda
