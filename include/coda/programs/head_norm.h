// Rotary positions with an RMSNorm over every head of q and k in front of them (Qwen 3), on one product that makes q, k and v
// together: z = r ⊙ acc; of q and k n = 1/sqrt(mean(z²) + eps) over the head, and rotate(n·gamma ⊙ z, position).
//
// v passes through: q and k are the first normed_columns of a row, a number that the program compares its column with. The
// other ways cost more: v's own product reads h again, and a mask or a weight of ones is one more operand for every element.
#pragma once
#include "coda/programs/rope.h"

namespace coda {

/// Columns of a head: the norm's group. Heads begin at column 0 and follow each other; a multiple of 16.
template <int Columns>
struct HeadWidth {
  static constexpr int value = Columns;
};

struct KeepUnnormed {
  static constexpr bool value = true;
};
struct DropUnnormed {
  static constexpr bool value = false;
};

template <class S = Tensors<bf16>, class Width = HeadWidth<128>, class Keep = KeepUnnormed>
struct HeadNormRope {
  float eps;
  int32_t normed_columns;            // of q and k together, in front of v
  In<S, PerRow<float>> inv_rms;      // [M]  of the norm in front of the product
  In<S, PerRow<int32_t>> position;   // [M]
  In<S, PerPair<float>> turns_high;  // [N/2]  0 for the pairs of v
  In<S, PerPair<float>> turns_low;   // [N/2]
  In<S, PerCol<float>> gamma;        // [N]  packed as q and k are; the columns of v are not looked at
  Local<S, RowSum<float, Width::value>> sum_sq;
  Out<S, When<Keep, Tile<>>> z;  // [M, N]  r ⊙ acc, for the backward pass
  Out<S, Tile<>> qkv;            // [M, N]  packed q and k

  CODA_FN void measure(Pair<Real<S>>& acc) {
    acc = inv_rms * acc;
    sum_sq = acc * acc;
  }
  CODA_FN void operator()(Pair<Real<S>> acc, At<S> at) {
    const Real<S> n = 1.f / sqrt(sum_sq * (1.f / Width::value) + eps);
    const auto normed = at.col < Index<Real<S>>(normed_columns);
    const Pair<Real<S>> weight = n * Pair<Real<S>>(gamma);
    const Pair<Real<S>> scale{select(normed, weight.first, 1.f), select(normed, weight.second, 1.f)};
    z = acc;
    qkv = rotate(scale * acc, rotation<Real<S>>(to_real(position), turns_high, turns_low));
  }
};

/// acc is dL/d(qkv). With d_w the gradient turned back and u = n·z of a head:
/// d_gamma = Σ_rows d_w ⊙ u,  d_z = n·(d_u − u·mean(d_u·u)),  d_u = gamma ⊙ d_w. Of v d_z = acc.
template <class S = Tensors<bf16>, class Width = HeadWidth<128>>
struct HeadNormRopeBackward {
  float eps;
  int32_t normed_columns;
  In<S, PerRow<float>> inv_rms;      // [M]
  In<S, PerRow<int32_t>> position;   // [M]
  In<S, PerPair<float>> turns_high;  // [N/2]
  In<S, PerPair<float>> turns_low;   // [N/2]
  In<S, PerCol<float>> gamma;        // [N]
  In<S, Tile<>> z;                   // [M, N]  as the forward pass stored it
  Local<S, RowSum<float, Width::value>> sum_sq;
  Local<S, RowSum<float, Width::value>> dot_u;  // Σ d_u·z
  Out<S, Tile<>> d_qkv;                         // [M, N]  dL/dz times inv_rms: what the next two products read
  Out<S, ColSum<float, 64>> d_gamma;  // [M/64, N]  one for every head: their sum over the heads is gamma's gradient
  Out<S, RowSum<float, 128>> dot;     // [N/128, M]  <d_z, z>, for the norm in front of the product

  CODA_FN void measure(Pair<Real<S>>& acc) {
    acc = unrotate(acc, rotation<Real<S>>(to_real(position), turns_high, turns_low));
    const Pair<Real<S>> stored = z;
    sum_sq = stored * stored;
    dot_u = acc * Pair<Real<S>>(gamma) * stored;
  }
  CODA_FN void operator()(Pair<Real<S>> acc, At<S> at) {
    const Real<S> n = 1.f / sqrt(sum_sq * (1.f / Width::value) + eps);
    const auto normed = at.col < Index<Real<S>>(normed_columns);
    const Pair<Real<S>> stored = z, u = n * stored, d_weight = acc * u;
    const Pair<Real<S>> through_norm = n * (acc * Pair<Real<S>>(gamma) - n * dot_u * (1.f / Width::value) * u);
    const Pair<Real<S>> d_z{select(normed, through_norm.first, acc.first),
                            select(normed, through_norm.second, acc.second)};
    d_gamma = Pair<Real<S>>{select(normed, d_weight.first, 0.f), select(normed, d_weight.second, 0.f)};
    d_qkv = inv_rms * d_z;
    dot = coda::dot(d_z, stored);
  }
};

}  // namespace coda
