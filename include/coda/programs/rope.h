// Rotary positions with the norm in front of them, on one product that makes q, k and v together.
//
// A pair's angle is position · frequency. The frequency is given in turns per position as two floats, high + low, so that
// the angle's fraction of a turn comes out of an exact product at any position below 2^24. Pairs of frequency 0 (v, and
// what partial rotary embeddings leave alone) pass unchanged.
#pragma once
#include "coda/operands.h"
#include "coda/programs/activation.h"

namespace coda {

/// (cos, sin) of position · (turns_high + turns_low) turns.
template <class T>
CODA_FN Pair<T> rotation(T position, T turns_high, T turns_low) {
  const T whole = rint(position * turns_high);
  const T turns = fma(position, turns_high, -whole) + position * turns_low;
  return cos_sin_turns(turns - rint(turns));
}

/// z turned by the angle whose (cos, sin) is given.
template <class T>
CODA_FN Pair<T> rotate(Pair<T> z, Pair<T> cos_sin) {
  const auto [c, s] = cos_sin;
  return {z.first * c - z.second * s, z.second * c + z.first * s};
}
/// z turned back.
template <class T>
CODA_FN Pair<T> unrotate(Pair<T> z, Pair<T> cos_sin) {
  return rotate(z, Pair<T>{cos_sin.first, -cos_sin.second});
}

/// q, k: rotate(r ⊙ acc + bias, position);  v: r ⊙ acc + bias.
template <class S = Tensors<bf16>, class Bias = WithoutBias>
struct RmsNormRope {
  In<S, PerRow<float>> inv_rms;           // [M]
  In<S, PerRow<int32_t>> position;        // [M]
  In<S, PerPair<float>> turns_high;       // [N/2]  0 for the pairs of v
  In<S, PerPair<float>> turns_low;        // [N/2]
  In<S, When<Bias, PerCol<float>>> bias;  // [N]  packed as q and k are
  Out<S, Tile<>> qkv;                     // [M, N]  packed q and k

  CODA_FN void operator()(Pair<Real<S>> acc) {
    Pair<Real<S>> z = inv_rms * acc;
    if constexpr (Bias::value) z = z + Pair<Real<S>>(bias);
    qkv = rotate(z, rotation<Real<S>>(to_real(position), turns_high, turns_low));
  }
};

/// acc is dL/d(qkv) as attention's backward leaves it: turned back and scaled, ready for the next two products.
template <class S = Tensors<bf16>, class Bias = WithoutBias>
struct RopeBackward {
  In<S, PerRow<float>> inv_rms;                  // [M]
  In<S, PerRow<int32_t>> position;               // [M]
  In<S, PerPair<float>> turns_high;              // [N/2]
  In<S, PerPair<float>> turns_low;               // [N/2]
  In<S, When<Bias, PerCol<float>>> bias;         // [N]
  In<S, Tile<>> qkv;                             // [M, N]  as the forward pass stored it
  Out<S, Tile<>> d_qkv;                          // [M, N]  times inv_rms
  Out<S, When<Bias, ColSum<float, 64>>> d_bias;  // [M/64, N]
  Out<S, RowSum<float, 128>> dot;  // [N/128, M]  <d_qkv, qkv>, which a rotation does not change, − <d_qkv, bias>

  CODA_FN void operator()(Pair<Real<S>> acc) {
    const auto d_z = unrotate(acc, rotation<Real<S>>(to_real(position), turns_high, turns_low));
    d_qkv = inv_rms * d_z;
    const Real<S> with_bias = coda::dot(acc, Pair<Real<S>>(qkv));
    if constexpr (Bias::value) {
      d_bias = d_z;
      dot = with_bias - coda::dot(d_z, Pair<Real<S>>(bias));
    } else {
      dot = with_bias;
    }
  }
};

}  // namespace coda
