// The operators of a Llama's layer boundaries, and of its relatives': everything between two attentions, forward and backward (src/llama/layer.h).
#include "glu.h"
#include "heads.h"
#include "norm.h"
#include "operators.h"

namespace coda::torch_ops {

namespace {

using llama::LayerScratch;
using llama::LayerWeights;
using llama::MlpTape;
using Order = PackedRows::Order;

Weight o_weight(const Tensor& wo) {
  return {{{"o_proj.weight", wo, {}}}, std::nullopt};
}
Weight down_weight(const Tensor& w_down) {
  return {{{"down_proj.weight", w_down, {}}}, std::nullopt};
}
Weight gate_up_weight(const Tensor& w_gate, const Tensor& w_up, const Tensor& gamma) {
  return {{{"gate_proj.weight", w_gate, {.order = Order::gate}}, {"up_proj.weight", w_up, {.order = Order::up}}},
          gamma,
          "the norm's weight in front of gate_proj"};
}

/// Memory that a half of a layer needs, for rows of `width` columns at most.
template <class E>
struct Scratch {
  Tensor partial, mean_dot, y, d_gate_up;
  LayerScratch<E> views;

  Scratch(const Tensor& like, int64_t m, int64_t width, int64_t ffn, bool backward)
      : partial(empty<float>(like, {coda::detail::row_slot_count(width), m})),
        mean_dot(empty<float>(like, {backward ? m : 0})),
        y(empty<E>(like, {m, ffn})),
        d_gate_up(empty<E>(like, {m, backward ? 2 * ffn : 0})),
        views{matrix<float>(partial, "partial"), vector<float>(mean_dot, "mean_dot"), matrix<E>(y, "y"),
              backward ? matrix<E>(d_gate_up, "d_gate_up") : Matrix<E>{}} {}
};

/// What F1 to F3 store.
struct Mlp {
  Tensor h_next, inv_rms_next, h_mid, inv_rms_mid, gate_up;
};

template <class Engine, class E>
Mlp mlp(Engine& engine, const Tensor& a, const Tensor& h, const Tensor& wo, const Tensor& gamma, const Tensor& w_gate,
        const Tensor& w_up, const Tensor& w_down, int64_t glu, double eps, bool keep) {
  const int64_t m = h.size(0), d = h.size(1), f = w_gate.size(0);
  Mlp out{empty<E>(h, {m, d}), empty<float>(h, {m}), empty<E>(h, {m, d}), empty<float>(h, {m}),
          empty<E>(h, {keep ? m : 0, 2 * f})};
  const Tensor o = packed<E>(engine, o_weight(wo)), gate_up = packed<E>(engine, gate_up_weight(w_gate, w_up, gamma)),
               down = packed<E>(engine, down_weight(w_down));
  const Scratch<E> scratch(h, m, d, f, false);
  const LayerWeights<E> weights{{},
                                matrix<const E>(o, "o_proj.weight"),
                                matrix<const E>(gate_up, "gate_up"),
                                matrix<const E>(down, "down_proj.weight")};
  with_glu(glu, [&]<class Function>(Function) {
    const MlpTape<E> tape{matrix<E>(out.h_mid, "h_mid"), vector<float>(out.inv_rms_mid, "inv_rms_mid"),
                          keep ? matrix<E>(out.gate_up, "gate_up") : Matrix<E>{}};
    llama::mlp_forward<Engine, E, Function>(
        engine, eps, weights, matrix<const E>(h, "h"), matrix<const E>(a, "a"), tape, scratch.views,
        {matrix<E>(out.h_next, "h_next"), vector<float>(out.inv_rms_next, "inv_rms_next")});
  });
  return out;
}

struct MlpGradients {
  Tensor d_a, d_h, d_wo, d_gamma, d_w_gate, d_w_up, d_w_down;
};

/// B3 to B1, and the gradients of their weights: bits 0 to 4 of mask are wo, gamma, w_gate, w_up, w_down.
template <class Engine, class E>
MlpGradients mlp_gradients(Engine& engine, const Tensor& d_h_next, const Tensor& a, const Tensor& h_mid,
                           const Tensor& inv_rms_mid, const Tensor& gate_up, const Tensor& wo, const Tensor& gamma,
                           const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down, int64_t glu, int64_t mask) {
  const int64_t m = h_mid.size(0), d = h_mid.size(1), f = w_gate.size(0);
  const Weight of_o = o_weight(wo), of_gate_up = gate_up_weight(w_gate, w_up, gamma), of_down = down_weight(w_down);
  MlpGradients out{empty<E>(a, {m, a.size(1)}), empty<E>(a, {m, d}), {}, {}, {}, {}, {}};
  const Scratch<E> scratch(a, m, f, f, true);
  {
    const Tensor o = packed<E>(engine, of_o), gate_up_packed = packed<E>(engine, of_gate_up),
                 down = packed<E>(engine, of_down);
    const LayerWeights<E> weights{{},
                                  matrix<const E>(o, "o_proj.weight"),
                                  matrix<const E>(gate_up_packed, "gate_up"),
                                  matrix<const E>(down, "down_proj.weight")};
    const MlpTape<E> tape{matrix<E>(h_mid, "h_mid"), vector<float>(inv_rms_mid, "inv_rms_mid"),
                          matrix<E>(gate_up, "gate_up")};
    with_glu(glu, [&]<class Function>(Function) {
      llama::mlp_backward<Engine, E, Function>(engine, weights, matrix<const E>(a, "a"), tape, scratch.views,
                                               matrix<const E>(d_h_next, "d_h_next"), matrix<E>(out.d_h, "d_h"),
                                               matrix<E>(out.d_a, "d_a"), {}, false);
    });
  }
  const Matrix<const E> y = scratch.views.y, d_gate_up = scratch.views.d_gate_up;
  out.d_w_down =
      weight_gradients<E>(engine, of_down, matrix<const E>(d_h_next, "d_h_next"), y, {needs(mask, 4)}).parts[0];
  WeightGradients of_pair = weight_gradients<E>(engine, of_gate_up, d_gate_up, matrix<const E>(h_mid, "h_mid"),
                                                {needs(mask, 2), needs(mask, 3), needs(mask, 1)});
  out.d_w_gate = of_pair.parts[0], out.d_w_up = of_pair.parts[1], out.d_gamma = of_pair.gamma;
  out.d_wo =
      weight_gradients<E>(engine, of_o, matrix<const E>(out.d_h, "d_h"), matrix<const E>(a, "a"), {needs(mask, 0)})
          .parts[0];
  return out;
}

}  // namespace

Tensors7 block(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down,
               Tensor gamma_attention, Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq,
               std::optional<Tensor> bk, std::optional<Tensor> bv, std::optional<Tensor> q_norm,
               std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim, int64_t glu, double eps,
               bool keep) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const Projections next{gamma_attention, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps};
    const Mlp half = mlp<Engine, E>(engine, a, h, wo, gamma_mlp, w_gate, w_up, w_down, glu, eps, keep);
    const Qkv made = qkv_forward<Engine, E>(engine, next, half.h_next, half.inv_rms_next, keep);
    return Tensors7{half.h_next,      made.qkv,     half.inv_rms_next, half.h_mid,
                    half.inv_rms_mid, half.gate_up, made.unnormed};
  });
}

Tensors16 block_backward(Tensor d_h_next, Tensor d_qkv, Tensor a, Tensor h_next, Tensor qkv, Tensor inv_rms_next,
                         Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor unnormed, Tensor wo, Tensor gamma_mlp,
                         Tensor w_gate, Tensor w_up, Tensor w_down, Tensor gamma_attention, Tensor wq, Tensor wk,
                         Tensor wv, std::optional<Tensor> bq, std::optional<Tensor> bk, std::optional<Tensor> bv,
                         std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor position, Tensor turns,
                         int64_t head_dim, int64_t glu, double eps, int64_t mask) {
  return on_engine(h_next, [&]<class Engine, class E>(Engine& engine) {
    const Projections next{gamma_attention, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps};
    const auto [d_h, d_weight, d_bias, d_norms] = qkv_backward<Engine, E>(engine, next, d_qkv, h_next, {qkv, unnormed},
                                                                          inv_rms_next, d_h_next, QkvNeeds(mask, 5));
    const MlpGradients half = mlp_gradients<Engine, E>(engine, d_h, a, h_mid, inv_rms_mid, gate_up, wo, gamma_mlp,
                                                       w_gate, w_up, w_down, glu, mask);
    return Tensors16{half.d_a,          half.d_h,          half.d_wo,         half.d_gamma,
                     half.d_w_gate,     half.d_w_up,       half.d_w_down,     d_weight.gamma,
                     d_weight.parts[0], d_weight.parts[1], d_weight.parts[2], d_bias[0],
                     d_bias[1],         d_bias[2],         d_norms[0],        d_norms[1]};
  });
}

Tensors4 block_tail(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down,
                    int64_t glu, double eps, bool keep) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const Mlp half = mlp<Engine, E>(engine, a, h, wo, gamma_mlp, w_gate, w_up, w_down, glu, eps, keep);
    return Tensors4{half.h_next, half.h_mid, half.inv_rms_mid, half.gate_up};
  });
}

Tensors7 block_tail_backward(Tensor d_h_next, Tensor a, Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor wo,
                             Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down, int64_t glu, int64_t mask) {
  return on_engine(h_mid, [&]<class Engine, class E>(Engine& engine) {
    const MlpGradients half = mlp_gradients<Engine, E>(engine, d_h_next, a, h_mid, inv_rms_mid, gate_up, wo, gamma_mlp,
                                                       w_gate, w_up, w_down, glu, mask);
    return Tensors7{half.d_a, half.d_h, half.d_wo, half.d_gamma, half.d_w_gate, half.d_w_up, half.d_w_down};
  });
}

Tensors3 norm_linear_rope(Tensor h, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq,
                          std::optional<Tensor> bk, std::optional<Tensor> bv, std::optional<Tensor> q_norm,
                          std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim, double eps,
                          bool keep) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const Projections of{gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps};
    const Tensor inv_rms = inv_rms_of<Engine, E>(engine, h, eps);
    const Qkv made = qkv_forward<Engine, E>(engine, of, h, inv_rms, keep);
    return Tensors3{made.qkv, inv_rms, made.unnormed};
  });
}

Tensors10 norm_linear_rope_backward(Tensor d_qkv, Tensor h, Tensor qkv, Tensor inv_rms, Tensor unnormed, Tensor gamma,
                                    Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq, std::optional<Tensor> bk,
                                    std::optional<Tensor> bv, std::optional<Tensor> q_norm,
                                    std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim,
                                    double eps, int64_t mask) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const Projections of{gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps};
    const auto [d_h, d_weight, d_bias, d_norms] =
        qkv_backward<Engine, E>(engine, of, d_qkv, h, {qkv, unnormed}, inv_rms, std::nullopt, QkvNeeds(mask, 0));
    return Tensors10{d_h,       d_weight.gamma, d_weight.parts[0], d_weight.parts[1], d_weight.parts[2],
                     d_bias[0], d_bias[1],      d_bias[2],         d_norms[0],        d_norms[1]};
  });
}

// The same in parts, for processes that have rows of the stream and parts of the weights (coda_torch/parallel.py). What is
// exchanged between them lies between two of these operators. The derivative of a norm is linear in the products behind it: each process
// makes its part with the s of its own outputs, and the parts are added where they are scattered.

Tensors2 add_inv_rms(Tensor x, Tensor residual, double eps) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = x.size(0), d = x.size(1);
    Tensor h = empty<E>(x, {m, d}), r = empty<float>(x, {m});
    const Tensor partial = empty<float>(x, {coda::detail::row_slot_count(d), m});
    map(engine, matrix<const E>(x, "x"),
        Residual<Tensors<E>>{.residual = matrix<const E>(residual, "residual"),
                             .h = matrix<E>(h, "h"),
                             .sum_sq = matrix<float>(partial, "partial")});
    inv_rms(engine, matrix<const float>(partial, "partial"), d, eps, vector<float>(r, "inv_rms"));
    return Tensors2{h, r};
  });
}

Tensor stream_qkv(Tensor h, Tensor inv_rms, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, Tensor position,
                  Tensor turns, int64_t head_dim) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const Projections of{
        .gamma = gamma, .wq = wq, .wk = wk, .wv = wv, .position = position, .turns = turns, .head_dim = head_dim};
    return qkv_forward<Engine, E>(engine, of, h, inv_rms, false).qkv;
  });
}

Tensors2 stream_mlp(Tensor h, Tensor inv_rms, Tensor gamma, Tensor w_gate, Tensor w_up, Tensor w_down, bool keep) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = h.size(0), f = w_gate.size(0);
    Tensor out = empty<E>(h, {m, w_down.size(0)}), gate_up = empty<E>(h, {keep ? m : 0, 2 * f});
    const Tensor pair = packed<E>(engine, gate_up_weight(w_gate, w_up, gamma)),
                 down = packed<E>(engine, down_weight(w_down)), y = empty<E>(h, {m, f});
    const auto run = [&](auto program) {
      gemm(engine, matrix<const E>(h, "h"), matrix<const E>(pair, "gate_up"), program);
    };
    const Vector<const float> r = vector<const float>(inv_rms, "inv_rms");
    if (keep)
      run(RmsNormSwiGlu<Tensors<E>>{.inv_rms = r, .gate_up = matrix<E>(gate_up, "gate_up"), .y = matrix<E>(y, "y")});
    else
      run(RmsNormSwiGlu<Tensors<E>, DropGateUp>{.inv_rms = r, .y = matrix<E>(y, "y")});
    gemm(engine, matrix<const E>(y, "y"), matrix<const E>(down, "down_proj.weight"),
         Store<Tensors<E>>{.out = matrix<E>(out, "out")});
    return Tensors2{out, gate_up};
  });
}

Tensors5 stream_mlp_backward(Tensor d_out, Tensor h, Tensor inv_rms, Tensor gate_up, Tensor gamma, Tensor w_gate,
                             Tensor w_up, Tensor w_down, int64_t mask) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = h.size(0), d = h.size(1), f = w_gate.size(0);
    const Weight of_gate_up = gate_up_weight(w_gate, w_up, gamma), of_down = down_weight(w_down);
    const Scratch<E> scratch(h, m, f, f, true);
    const LayerScratch<E>& views = scratch.views;
    const Vector<const float> r = vector<const float>(inv_rms, "inv_rms");
    Tensor d_h = empty<E>(h, {m, d});
    {
      const Tensor pair = packed<E>(engine, of_gate_up), down = packed<E>(engine, of_down);
      gemm(engine, matrix<const E>(d_out, "d_out"), transpose(matrix<const E>(down, "down_proj.weight")),
           SwiGluBackward<Tensors<E>>{.inv_rms = r,
                                      .gate_up = matrix<const E>(gate_up, "gate_up"),
                                      .d_gate_up = views.d_gate_up,
                                      .y = views.y,
                                      .dot_z = views.partial});
      llama::normed_product_backward<Engine, E>(
          engine, matrix<const E>(pair, "gate_up"), {matrix<const E>(h, "h"), r}, views.partial, views.mean_dot,
          matrix<const E>(scratch.d_gate_up, "d_gate_up"), {}, matrix<E>(d_h, "d_h"));
    }
    const WeightGradients down = weight_gradients<E>(engine, of_down, matrix<const E>(d_out, "d_out"),
                                                     matrix<const E>(scratch.y, "y"), {needs(mask, 3)});
    const WeightGradients pair =
        weight_gradients<E>(engine, of_gate_up, matrix<const E>(scratch.d_gate_up, "d_gate_up"),
                            matrix<const E>(h, "h"), {needs(mask, 1), needs(mask, 2), needs(mask, 0)});
    return Tensors5{d_h, pair.gamma, pair.parts[0], pair.parts[1], down.parts[0]};
  });
}

}  // namespace coda::torch_ops
