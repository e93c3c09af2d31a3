// Gated linear units with the norm in front of them: y = f(gate, up), (gate, up) = r ⊙ acc. f is a function object of
// activation.h, or of yours.
#pragma once
#include "coda/programs/activation.h"

namespace coda {

struct KeepGateUp {
  static constexpr bool value = true;
};
struct DropGateUp {
  static constexpr bool value = false;
};

/// z = r ⊙ acc, pairs of (gate, up);  y = f(z).
template <class S = Tensors<bf16>, class Function = Swiglu, class Keep = KeepGateUp>
struct RmsNormGlu {
  Function f;
  In<S, PerRow<float>> inv_rms;        // [M]
  Out<S, When<Keep, Tile<>>> gate_up;  // [M, 2F]  packed; kept for the backward pass
  Out<S, HalfTile<>> y;                // [M, F]

  CODA_FN void operator()(Pair<Real<S>> acc) {
    const auto z = inv_rms * acc;
    gate_up = z;
    y = f(z);
  }
};

/// acc is dL/dy of y = f(gate_up).
template <class S = Tensors<bf16>, class Function = Swiglu>
struct GluBackward {
  Function f;
  In<S, PerRow<float>> inv_rms;      // [M]
  In<S, DoubleTile<>> gate_up;       // [M, 2F]  packed
  Out<S, DoubleTile<>> d_gate_up;    // [M, 2F]  times inv_rms: what the next two products read
  Out<S, Tile<>> y;                  // [M, F]   again, for the weight gradient
  Out<S, RowSum<float, 128>> dot_z;  // [F/128, M]  <d_gate_up, gate_up>, for the norm in front

  CODA_FN void operator()(Real<S> d_y) {
    const auto [value, d_z] = value_and_vjp(f, Pair<Real<S>>(gate_up), d_y);
    d_gate_up = inv_rms * d_z;
    y = value;
    dot_z = dot(d_z, Pair<Real<S>>(gate_up));
  }
};

}  // namespace coda
