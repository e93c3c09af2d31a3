// SwiGLU with the norm in front of it: y = silu(gate) · up, (gate, up) = r ⊙ acc.
#pragma once
#include "coda/operands.h"
#include "coda/vjp.h"

namespace coda {

struct Swiglu {
  template <class T>
  CODA_FN T operator()(Pair<T> z) const {
    return silu(z.first) * z.second;
  }
};

struct KeepGateUp {
  static constexpr bool value = true;
};
struct DropGateUp {
  static constexpr bool value = false;
};

/// z = r ⊙ acc, pairs of (gate, up);  y = silu(z.gate) · z.up.
template <class S = Tensors<bf16>, class Keep = KeepGateUp>
struct RmsNormSwiGlu {
  In<S, PerRow<float>> inv_rms;        // [M]
  Out<S, When<Keep, Tile<>>> gate_up;  // [M, 2F]  packed; kept for the backward pass
  Out<S, HalfTile<>> y;                // [M, F]

  CODA_FN void operator()(Pair<Real<S>> acc) {
    const auto z = inv_rms * acc;
    gate_up = z;
    y = Swiglu{}(z);
  }
};

/// acc is dL/dy of y = swiglu(gate_up).
template <class S = Tensors<bf16>>
struct SwiGluBackward {
  In<S, PerRow<float>> inv_rms;      // [M]
  In<S, DoubleTile<>> gate_up;       // [M, 2F]  packed
  Out<S, DoubleTile<>> d_gate_up;    // [M, 2F]  times inv_rms: what the next two products read
  Out<S, Tile<>> y;                  // [M, F]   again, for the weight gradient
  Out<S, RowSum<float, 128>> dot_z;  // [F/128, M]  <d_gate_up, gate_up>, for the norm in front

  CODA_FN void operator()(Real<S> d_y) {
    // vjp(Swiglu{}, gate_up, d_y) by hand: the sigmoid is shared with y.
    const auto [gate, up] = Pair<Real<S>>(gate_up);
    const auto s = sigmoid(gate);
    const auto gated = gate * s;
    const Pair<Real<S>> d_z{d_y * up * (s + gated * (1.f - s)), d_y * gated};
    d_gate_up = inv_rms * d_z;
    y = gated * up;
    dot_z = dot(d_z, Pair<Real<S>>(gate_up));
  }
};

}  // namespace coda
