// Between the product of q, k and v and attention: rotary positions, and in some models a bias in front of them (Qwen 2) or a norm
// over every head of q and k (Qwen 3). Each is another program in that product's epilogue (coda/programs/rope.h, head_norm.h).
#pragma once
#include "coda/programs/head_norm.h"
#include "llama/layer_rows.h"
#include "operand_shape.h"
#include "weight.h"

namespace coda::torch_ops {

/// The operands that make q, k and v of a normed stream.
struct Projections {
  Tensor gamma, wq, wk, wv;
  std::optional<Tensor> bq, bk, bv;      // all of them, or none
  std::optional<Tensor> q_norm, k_norm;  // [head_dim]  both, and then no bias, or none
  Tensor position, turns;
  int64_t head_dim;
  double eps = 0;  // of norms over heads

  bool biased() const { return bq || bk || bv; }
  /// Throws OperandError beside a bias.
  bool normed() const {
    const bool any = q_norm || k_norm;
    if (any && biased()) throw OperandError("q_norm", "beside a bias", "to be without one");
    return any;
  }

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
    return {{"q_proj.bias", bq, wq.size(0), q_rows(), wq.size(0)},
            {"k_proj.bias", bk, wk.size(0), k_rows(), wk.size(0)},
            {"v_proj.bias", bv, wv.size(0), v_rows(), wv.size(0)}};
  }
  std::vector<ColumnPart> norms() const {
    return {{"q_norm.weight", q_norm, head_dim, q_rows(), wq.size(0)},
            {"k_norm.weight", k_norm, head_dim, k_rows(), wk.size(0)}};
  }
  template <class Engine>
  llama::Places<Engine> places() const {
    const Matrix<const float> both = matrix<const float>(turns, "turns");
    return {{}, vector<const int32_t>(position, "position"), {both.row(0), both.cols}, {both.row(1), both.cols}};
  }
};

/// body(HeadWidth<head_dim>{}), of those that norms over heads are compiled for. Throws OperandError.
template <class Body>
void with_head_width(int64_t head_dim, const Body& body) {
  if (head_dim == 64) return body(HeadWidth<64>{});
  if (head_dim == 128) return body(HeadWidth<128>{});
  throw OperandError("head_dim", std::to_string(head_dim) + " beside q_norm", "64 or 128");
}

struct Qkv {
  Tensor qkv;       // [M, N]
  Tensor unnormed;  // [M, N]  what norms over heads keep for the backward pass; otherwise without rows
};

/// q, k and v of h and its r.
template <class Engine, class E>
Qkv qkv_forward(Engine& engine, const Projections& of, const Tensor& h, const Tensor& inv_rms, bool keep) {
  const int64_t m = h.size(0), n = of.width();
  const bool normed = of.normed();
  Qkv out{empty<E>(h, {m, n}), empty<E>(h, {normed && keep ? m : 0, n})};
  const Tensor packed_weight = packed<E>(engine, of.weight());
  const llama::Places<Engine> places = of.places<Engine>();
  const llama::Stream<const E> in{matrix<const E>(h, "h"), vector<const float>(inv_rms, "inv_rms")};
  const Matrix<const E> w = matrix<const E>(packed_weight, "qkv");
  const Matrix<E> qkv = matrix<E>(out.qkv, "qkv");
  if (of.biased()) {
    const Tensor bias = packed_columns(engine, of.bias(), h, n);
    gemm(engine, in.h, w,
         RmsNormRope<Tensors<E>, WithBias>{.inv_rms = in.inv_rms,
                                           .position = places.positions,
                                           .turns_high = places.turns_high,
                                           .turns_low = places.turns_low,
                                           .bias = vector<const float>(bias, "bias"),
                                           .qkv = qkv});
  } else if (normed) {
    const Tensor gamma = packed_columns(engine, of.norms(), h, n);
    with_head_width(of.head_dim, [&]<class Width>(Width) {
      // A head of 64 has the program that keeps z only.
      using Keep = std::conditional_t<Width::value == 128, DropUnnormed, KeepUnnormed>;
      const auto run = [&](auto program) {
        program.eps = static_cast<float>(of.eps);
        program.normed_columns = static_cast<int32_t>(of.wq.size(0) + of.wk.size(0));
        program.inv_rms = in.inv_rms;
        program.position = places.positions;
        program.turns_high = places.turns_high;
        program.turns_low = places.turns_low;
        program.gamma = vector<const float>(gamma, "gamma");
        program.qkv = qkv;
        gemm(engine, in.h, w, program);
      };
      if (keep) return run(HeadNormRope<Tensors<E>, Width>{.z = matrix<E>(out.unnormed, "z")});
      HeadNormRope<Tensors<E>, Width, Keep> program{};
      Tensor z;
      if constexpr (std::is_same_v<Keep, KeepUnnormed>) {
        z = empty<E>(h, {m, n});
        program.z = matrix<E>(z, "z");
      }
      run(program);
    });
  } else {
    llama::qkv_forward<Engine, E>(engine, places, {w, {}, {}, {}}, in, qkv);
  }
  return out;
}

/// Gradients that are not asked for are empty.
struct QkvGradients {
  Tensor d_h;
  WeightGradients weight;
  std::vector<Tensor> bias;   // of bq, bk and bv
  std::vector<Tensor> norms;  // of q_norm and k_norm
};

/// Which gradients are asked for.
struct QkvNeeds {
  std::vector<bool> weight;  // wq, wk, wv, gamma
  std::vector<bool> bias;    // bq, bk, bv
  std::vector<bool> norms;   // q_norm, k_norm

  /// Bits of a mask from `first` on, in the order of the operators' parameters: gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm.
  QkvNeeds(int64_t mask, int first)
      : weight{needs(mask, first + 1), needs(mask, first + 2), needs(mask, first + 3), needs(mask, first)},
        bias{needs(mask, first + 4), needs(mask, first + 5), needs(mask, first + 6)},
        norms{needs(mask, first + 7), needs(mask, first + 8)} {}
};

/// B4, its product, and the gradients of its parameters. made: what qkv_forward has made and kept. d_residual: what else reaches h.
template <class Engine, class E>
QkvGradients qkv_backward(Engine& engine, const Projections& of, const Tensor& d_qkv, const Tensor& h, const Qkv& made,
                          const Tensor& inv_rms, const std::optional<Tensor>& d_residual, const QkvNeeds& needed) {
  const int64_t m = h.size(0), n = of.width();
  const bool normed = of.normed();
  const Weight weight = of.weight();
  const Tensor packed_weight = packed<E>(engine, weight);
  const Tensor d_products = empty<E>(h, {m, n}), partial = empty<float>(h, {coda::detail::row_slot_count(n), m}),
               mean_dot = empty<float>(h, {m});
  QkvGradients out{empty<E>(h, {m, h.size(1)}),
                   {},
                   {not_asked(of.wq), not_asked(of.wq), not_asked(of.wq)},
                   {not_asked(of.wq), not_asked(of.wq)}};
  const llama::Places<Engine> places = of.places<Engine>();
  const llama::Stream<const E> in{matrix<const E>(h, "h"), vector<const float>(inv_rms, "inv_rms")};
  const Matrix<float> dot = matrix<float>(partial, "partial");
  const Vector<float> s = vector<float>(mean_dot, "mean_dot");
  const Matrix<const E> w = matrix<const E>(packed_weight, "qkv"), d = matrix<const E>(d_qkv, "d_qkv"),
                        residual = d_residual ? matrix<const E>(*d_residual, "d_residual") : Matrix<const E>{};
  const Matrix<E> d_out = matrix<E>(d_products, "d_qkv"), d_h = matrix<E>(out.d_h, "d_h");

  if (of.biased()) {
    const Tensor bias = packed_columns(engine, of.bias(), h, n),
                 slots = empty<float>(h, {coda::detail::column_slot_count(m), n});
    map(engine, d,
        RopeBackward<Tensors<E>, WithBias>{.inv_rms = in.inv_rms,
                                           .position = places.positions,
                                           .turns_high = places.turns_high,
                                           .turns_low = places.turns_low,
                                           .bias = vector<const float>(bias, "bias"),
                                           .qkv = matrix<const E>(made.qkv, "qkv"),
                                           .d_qkv = d_out,
                                           .d_bias = matrix<float>(slots, "d_bias"),
                                           .dot = dot});
    out.bias = column_gradients(engine, of.bias(), slots, needed.bias);
    llama::normed_product_backward<Engine, E>(engine, w, in, dot, s, d_out, residual, d_h);
  } else if (normed) {
    const Tensor gamma = packed_columns(engine, of.norms(), h, n),
                 slots = empty<float>(h, {coda::detail::column_slot_count(m), n});
    with_head_width(of.head_dim, [&]<class Width>(Width) {
      map(engine, d,
          HeadNormRopeBackward<Tensors<E>, Width>{.eps = static_cast<float>(of.eps),
                                                  .normed_columns = static_cast<int32_t>(of.wq.size(0) + of.wk.size(0)),
                                                  .inv_rms = in.inv_rms,
                                                  .position = places.positions,
                                                  .turns_high = places.turns_high,
                                                  .turns_low = places.turns_low,
                                                  .gamma = vector<const float>(gamma, "gamma"),
                                                  .z = matrix<const E>(made.unnormed, "z"),
                                                  .d_qkv = d_out,
                                                  .d_gamma = matrix<float>(slots, "d_gamma"),
                                                  .dot = dot});
    });
    out.norms = column_gradients(engine, of.norms(), slots, needed.norms);
    llama::normed_product_backward<Engine, E>(engine, w, in, dot, s, d_out, residual, d_h);
  } else {
    llama::qkv_backward<Engine, E>(engine, places, {w, {}, {}, {}}, in, matrix<const E>(made.qkv, "qkv"),
                                   {dot, s, {}, {}}, d, d_out, residual, d_h, {}, false);
  }
  out.weight = weight_gradients<E>(engine, weight, d_out, in.h, needed.weight);
  return out;
}

}  // namespace coda::torch_ops
