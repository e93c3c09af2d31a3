// Activations: function objects, of one value or of a pair (gate, up), and the programs that apply those of one value. Adding
// one is a struct here; its derivative comes from dual numbers. The gated ones have their programs in glu.h.
#pragma once
#include <limits>

#include "coda/operands.h"
#include "coda/vjp.h"

namespace coda {

// ---- of one value

/// relu(x)² (So et al., Primer, arXiv 2109.08668).
struct SquaredRelu {
  template <class T>
  CODA_FN T operator()(T x) const {
    const T positive = max(x, T(0.f));
    return positive * positive;
  }
};

/// x·Φ(x), the exact one.
struct GeluErf {
  template <class T>
  CODA_FN T operator()(T x) const {
    return gelu_erf(x);
  }
};

/// Its approximation by tanh: another function, 5e-4 away at x = −2.7.
struct GeluTanh {
  template <class T>
  CODA_FN T operator()(T x) const {
    return gelu_tanh(x);
  }
};

// ---- of a pair: z.first is the gate, z.second is up (Shazeer, arXiv 2002.05202)

/// silu(gate) · up.
struct Swiglu {
  template <class T>
  CODA_FN T operator()(Pair<T> z) const {
    return silu(z.first) * z.second;
  }
};
/// By hand: the sigmoid is shared.
template <class T>
CODA_FN ValueAndGradient<T, Pair<T>> value_and_vjp(Swiglu, Pair<T> z, std::type_identity_t<T> d_y) {
  const auto s = sigmoid(z.first);
  const auto gated = z.first * s;
  return {gated * z.second, {d_y * z.second * (s + gated * (1.f - s)), d_y * gated}};
}

/// gelu_erf(gate) · up.
struct GegluErf {
  template <class T>
  CODA_FN T operator()(Pair<T> z) const {
    return gelu_erf(z.first) * z.second;
  }
};

/// gelu_tanh(gate) · up.
struct GegluTanh {
  template <class T>
  CODA_FN T operator()(Pair<T> z) const {
    return gelu_tanh(z.first) * z.second;
  }
};

/// g·sigmoid(alpha·g)·(u + 1) with g = min(gate, limit) and u = up clamped to [−limit, limit]: the MLP of gpt-oss, whose limit
/// is 7. An infinite limit clamps nothing. Where a value is clamped its gradient is zero.
struct SwigluClamped {
  float limit = std::numeric_limits<float>::infinity();
  float alpha = 1.702f;

  template <class T>
  CODA_FN T operator()(Pair<T> z) const {
    const T gate = min(z.first, T(limit)), up = max(min(z.second, T(limit)), T(-limit));
    return gate * sigmoid(alpha * gate) * (up + 1.f);
  }
};

// ---- the programs

/// An RMSNorm stands in front of the product: z = r ⊙ acc.
struct NormInFront {
  static constexpr bool value = true;
};
struct NoNormInFront {
  static constexpr bool value = false;
};

/// A bias is added to the product's columns; its gradient is a ColSum of the backward program.
struct WithBias {
  static constexpr bool value = true;
};
struct WithoutBias {
  static constexpr bool value = false;
};

struct KeepInput {
  static constexpr bool value = true;
};
struct DropInput {
  static constexpr bool value = false;
};

/// z = r ⊙ acc + bias;  y = f(z).
template <class S = Tensors<bf16>, class Function = SquaredRelu, class Norm = NormInFront, class Bias = WithoutBias,
          class Keep = KeepInput>
struct Activated {
  Function f;
  In<S, When<Norm, PerRow<float>>> inv_rms;  // [M]
  In<S, When<Bias, PerCol<float>>> bias;     // [N]
  Out<S, When<Keep, Tile<>>> z;              // [M, N]  kept for the backward pass
  Out<S, Tile<>> y;                          // [M, N]

  CODA_FN void operator()(Real<S> acc) {
    Real<S> x = acc;
    if constexpr (Norm::value) x = inv_rms * x;
    if constexpr (Bias::value) x = x + bias;
    z = x;
    y = f(x);
  }
};

/// acc is dL/dy of y = f(z).
template <class S = Tensors<bf16>, class Function = SquaredRelu, class Norm = NormInFront, class Bias = WithoutBias>
struct ActivatedBackward {
  Function f;
  In<S, When<Norm, PerRow<float>>> inv_rms;      // [M]
  In<S, When<Bias, PerCol<float>>> bias;         // [N]
  In<S, Tile<>> z;                               // [M, N]
  Out<S, Tile<>> d_z;                            // [M, N]  times inv_rms: what the next two products read
  Out<S, Tile<>> y;                              // [M, N]  again, for the weight gradient
  Out<S, When<Norm, RowSum<float, 128>>> dot_z;  // [N/128, M]  <d_z, z − bias>, for the norm in front
  Out<S, When<Bias, ColSum<float, 64>>> d_bias;  // [M/64, N]

  CODA_FN void operator()(Real<S> d_y) {
    const auto [value, gradient] = value_and_vjp(f, Real<S>(z), d_y);
    y = value;
    d_bias = gradient;
    if constexpr (Norm::value) {
      Real<S> scaled = z;
      if constexpr (Bias::value) scaled = scaled - bias;
      dot_z = gradient * scaled;
      d_z = inv_rms * gradient;
    } else {
      d_z = gradient;
    }
  }
};

}  // namespace coda
