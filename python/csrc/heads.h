// Between the product of q, k and v and attention: rotary positions, and in some models a bias in front of them (Qwen 2). Each is
// another program in that product's epilogue (coda/programs/rope.h).
#pragma once
#include "llama/layer_rows.h"
#include "weight.h"

namespace coda::torch_ops {

/// The operands that make q, k and v of a normed stream.
struct Projections {
  Tensor gamma, wq, wk, wv;
  std::optional<Tensor> bq, bk, bv;  // all of them, or none
  Tensor position, turns;
  int64_t head_dim;

  PackedRows q_rows() const { return {.order = PackedRows::Order::half_split, .first = 0, .head_dim = head_dim}; }
  PackedRows k_rows() const {
    return {.order = PackedRows::Order::half_split, .first = wq.size(0), .head_dim = head_dim};
  }
  PackedRows v_rows() const { return {.order = PackedRows::Order::plain, .first = wq.size(0) + wk.size(0)}; }
  int64_t width() const { return wq.size(0) + wk.size(0) + wv.size(0); }

  Weight weight() const {
    return {{{"q_proj.weight", wq, q_rows()}, {"k_proj.weight", wk, k_rows()}, {"v_proj.weight", wv, v_rows()}},
            gamma,
            "the norm's weight in front of q_proj"};
  }
  std::vector<ColumnPart> bias() const {
    return {{"q_proj.bias", *bq, q_rows(), wq.size(0)},
            {"k_proj.bias", *bk, k_rows(), wk.size(0)},
            {"v_proj.bias", *bv, v_rows(), wv.size(0)}};
  }
  template <class Engine>
  llama::Places<Engine> places() const {
    const Matrix<const float> both = matrix<const float>(turns, "turns");
    return {{}, vector<const int32_t>(position, "position"), {both.row(0), both.cols}, {both.row(1), both.cols}};
  }
};

/// q, k and v [M, N] of h and its r.
template <class Engine, class E>
Tensor qkv_forward(Engine& engine, const Projections& of, const Tensor& h, const Tensor& inv_rms) {
  Tensor out = empty<E>(h, {h.size(0), of.width()});
  const Tensor w = packed<E>(engine, of.weight());
  const llama::Places<Engine> places = of.places<Engine>();
  const llama::Stream<const E> in{matrix<const E>(h, "h"), vector<const float>(inv_rms, "inv_rms")};
  if (!of.bq) {
    llama::qkv_forward<Engine, E>(engine, places, {matrix<const E>(w, "qkv"), {}, {}, {}}, in, matrix<E>(out, "qkv"));
    return out;
  }
  const Tensor bias = packed_columns(engine, of.bias(), of.width());
  gemm(engine, in.h, matrix<const E>(w, "qkv"),
       RmsNormRope<Tensors<E>, WithBias>{.inv_rms = in.inv_rms,
                                         .position = places.positions,
                                         .turns_high = places.turns_high,
                                         .turns_low = places.turns_low,
                                         .bias = vector<const float>(bias, "bias"),
                                         .qkv = matrix<E>(out, "qkv")});
  return out;
}

/// Gradients that are not asked for are empty.
struct QkvGradients {
  Tensor d_h;
  WeightGradients weight;
  std::vector<Tensor> bias;  // of bq, bk and bv
};

/// B4, its product, and the gradients of its parameters. d_residual: what else reaches h. needed: of wq, wk, wv, gamma; of bq, bk, bv.
template <class Engine, class E>
QkvGradients qkv_backward(Engine& engine, const Projections& of, const Tensor& d_qkv, const Tensor& h,
                          const Tensor& qkv, const Tensor& inv_rms, const std::optional<Tensor>& d_residual,
                          const std::vector<bool>& needed, const std::vector<bool>& needed_bias) {
  const int64_t m = h.size(0), n = of.width();
  const Weight weight = of.weight();
  const Tensor w = packed<E>(engine, weight);
  const Tensor d_products = empty<E>(h, {m, n}), partial = empty<float>(h, {coda::detail::row_slot_count(n), m}),
               mean_dot = empty<float>(h, {m});
  QkvGradients out{empty<E>(h, {m, h.size(1)}), {}, {}};
  const llama::Places<Engine> places = of.places<Engine>();
  const llama::Stream<const E> in{matrix<const E>(h, "h"), vector<const float>(inv_rms, "inv_rms")};
  const Matrix<float> dot = matrix<float>(partial, "partial");
  const Vector<float> s = vector<float>(mean_dot, "mean_dot");
  const Matrix<const E> d_out = matrix<const E>(d_products, "d_qkv"),
                        residual = d_residual ? matrix<const E>(*d_residual, "d_residual") : Matrix<const E>{};

  if (!of.bq) {
    llama::qkv_backward<Engine, E>(engine, places, {matrix<const E>(w, "qkv"), {}, {}, {}}, in,
                                   matrix<const E>(qkv, "qkv"), {dot, s, {}, {}}, matrix<const E>(d_qkv, "d_qkv"),
                                   matrix<E>(d_products, "d_qkv"), residual, matrix<E>(out.d_h, "d_h"), {}, false);
    out.bias = {not_asked(of.wq), not_asked(of.wk), not_asked(of.wv)};
  } else {
    const Tensor bias = packed_columns(engine, of.bias(), n), slots = empty<float>(h, {column_slot_count(m), n});
    map(engine, matrix<const E>(d_qkv, "d_qkv"),
        RopeBackward<Tensors<E>, WithBias>{.inv_rms = in.inv_rms,
                                           .position = places.positions,
                                           .turns_high = places.turns_high,
                                           .turns_low = places.turns_low,
                                           .bias = vector<const float>(bias, "bias"),
                                           .qkv = matrix<const E>(qkv, "qkv"),
                                           .d_qkv = matrix<E>(d_products, "d_qkv"),
                                           .d_bias = matrix<float>(slots, "d_bias"),
                                           .dot = dot});
    out.bias = column_gradients(engine, of.bias(), slots, needed_bias);
    llama::normed_product_backward<Engine, E>(engine, matrix<const E>(w, "qkv"), in, dot, s, d_out, residual,
                                              matrix<E>(out.d_h, "d_h"));
  }
  out.weight = weight_gradients<E>(engine, weight, d_out, in.h, needed);
  return out;
}

}  // namespace coda::torch_ops
