// The rows of layer.h's table as code. Included where a layer is instantiated for an engine, by a file that has that engine's
// products, maps, finishing reductions and attention in sight.
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "coda/finish.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "layer.h"
#include "operand_shape.h"

namespace coda::llama {

inline AttentionShape attention_shape(const Config& config) {
  return {.heads = config.heads, .kv_heads = config.kv_heads, .head_dim = config.head_dim};
}

/// [⌈cols/128⌉, rows] of workspace for a program's row reduction over tiles [rows, cols].
inline Matrix<float> row_slots(Matrix<float> partial, int64_t rows, int64_t cols) {
  return {partial.data, coda::detail::row_slot_count(cols), rows};
}

template <class Engine, class E>
LayerTape<Engine, E>::LayerTape(const Config& config, int64_t tokens, bool keep)
    : qkv(tokens, config.qkv_width()),
      attention(tokens, config.query_width()),
      log_sum_exp(keep ? config.heads : 0, tokens),
      h_mid(tokens, config.hidden),
      inv_rms_mid(1, tokens),
      gate_up(keep ? tokens : 0, 2 * config.ffn) {}

template <class Engine, class E>
LayerWorkspace<Engine, E>::LayerWorkspace(const Config& config, int64_t tokens, bool backward)
    : partial(coda::detail::row_slot_count(std::max({config.hidden, config.ffn, config.qkv_width()})), tokens),
      mean_dot(1, tokens),
      y(tokens, config.ffn) {
  if (!backward) return;
  d_gate_up = BufferOn<Engine, E>(tokens, 2 * config.ffn);
  d_h_mid = BufferOn<Engine, E>(tokens, config.hidden);
  d_attention = BufferOn<Engine, E>(tokens, config.query_width());
  d_qkv = BufferOn<Engine, E>(tokens, config.qkv_width());
}

template <class Engine, class E>
void qkv_forward(Engine& engine, const Places<Engine>& places, const LayerWeights<E>& weights, Stream<const E> in,
                 Matrix<E> qkv) {
  gemm(engine, in.h, weights.qkv,
       RmsNormRope<Tensors<E>>{.inv_rms = in.inv_rms,
                               .position = places.positions,
                               .turns_high = places.turns_high,
                               .turns_low = places.turns_low,
                               .qkv = qkv});
}

template <class Engine, class E, class Function>
void mlp_forward(Engine& engine, double rms_eps, const LayerWeights<E>& weights, Matrix<const E> h_in,
                 Matrix<const E> attention, const MlpTape<E>& tape, const LayerScratch<E>& scratch, Stream<E> out) {
  const int64_t m = h_in.rows, d = h_in.cols;
  const Matrix<float> sum_sq = row_slots(scratch.partial, m, d);

  gemm(engine, attention, weights.o, Residual<Tensors<E>>{.residual = h_in, .h = tape.h_mid, .sum_sq = sum_sq});
  inv_rms(engine, sum_sq, d, rms_eps, tape.inv_rms_mid);
  const Matrix<const E> h_mid = tape.h_mid;
  if (tape.gate_up.data != nullptr)
    gemm(engine, h_mid, weights.gate_up,
         RmsNormGlu<Tensors<E>, Function>{.inv_rms = tape.inv_rms_mid, .gate_up = tape.gate_up, .y = scratch.y});
  else
    gemm(engine, h_mid, weights.gate_up,
         RmsNormGlu<Tensors<E>, Function, DropGateUp>{.inv_rms = tape.inv_rms_mid, .y = scratch.y});
  const Matrix<const E> y = scratch.y;
  gemm(engine, y, weights.down, Residual<Tensors<E>>{.residual = tape.h_mid, .h = out.h, .sum_sq = sum_sq});
  inv_rms(engine, sum_sq, d, rms_eps, out.inv_rms);
}

template <class Engine, class E>
void layer_forward(Engine& engine, const Config& config, const Places<Engine>& places, const LayerWeights<E>& weights,
                   Stream<const E> in, LayerTape<Engine, E>& tape, LayerWorkspace<Engine, E>& workspace, bool keep,
                   Stream<E> out) {
  const int64_t m = in.h.rows;
  const Matrix<E> qkv = tape.qkv.top(m), attention = tape.attention.top(m);
  const Matrix<float> log_sum_exp =
      keep ? Matrix<float>{tape.log_sum_exp.matrix().data, config.heads, m} : Matrix<float>{};
  qkv_forward(engine, places, weights, in, qkv);
  attention_forward<E>(engine, attention_shape(config), places.documents, qkv, attention, log_sum_exp);
  mlp_forward<Engine, E>(engine, config.rms_eps, weights, in.h, attention, tape.mlp(m, keep),
                         workspace.scratch(m, false), out);
}

template <class Engine, class E>
void weight_gradient(Engine& engine, Matrix<const E> a, Matrix<const E> b, Matrix<float> out, bool add) {
  if (out.data == nullptr && out.rows == 0) return;
  // In float Store's own type is what is asked for, and no instantiation beside it.
  using StoreFloat = Store<Tensors<E>, std::conditional_t<std::is_same_v<E, float>, Activation, float>>;
  if (add)
    gemm_over_tokens(engine, transpose(a), transpose(b), AccumulateInto<Tensors<E>>{.out = out});
  else
    gemm_over_tokens(engine, transpose(a), transpose(b), StoreFloat{.out = out});
}

/// d_h of a product with a norm in front of it: d_out [M, N] is times r already, dot [slots, M] the partial sums of <dL/dy, r ⊙ (h Wᵀ)>,
/// s [M] memory for their means. d_residual: what else reaches in.h, or without data.
template <class Engine, class E>
void normed_product_backward(Engine& engine, Matrix<const E> weight, Stream<const E> in, Matrix<const float> dot,
                             Vector<float> s, Matrix<const E> d_out, Matrix<const E> d_residual, Matrix<E> d_h) {
  mean_dot(engine, dot, in.h.cols, s);
  if (d_residual.data != nullptr)
    gemm(engine, d_out, transpose(weight),
         RmsNormBackward<Tensors<E>>{
             .inv_rms = in.inv_rms, .mean_dot = s, .h = in.h, .d_residual = d_residual, .d_h = d_h});
  else
    gemm(engine, d_out, transpose(weight),
         RmsNormBackward<Tensors<E>, StreamEnds>{.inv_rms = in.inv_rms, .mean_dot = s, .h = in.h, .d_h = d_h});
}

template <class Engine, class E, class Function>
void mlp_backward(Engine& engine, const LayerWeights<E>& weights, Matrix<const E> attention, const MlpTape<E>& tape,
                  const LayerScratch<E>& scratch, Matrix<const E> d_h_next, Matrix<E> d_h_mid, Matrix<E> d_attention,
                  const LayerGradients& gradients, bool add) {
  const Matrix<const E> y = scratch.y, d_gate_up = scratch.d_gate_up, h_mid = tape.h_mid, d_h_mid_stored = d_h_mid;

  // B3
  const Matrix<float> dot_z = row_slots(scratch.partial, d_h_next.rows, y.cols);
  gemm(engine, d_h_next, transpose(weights.down),
       GluBackward<Tensors<E>, Function>{.inv_rms = tape.inv_rms_mid,
                                         .gate_up = tape.gate_up,
                                         .d_gate_up = scratch.d_gate_up,
                                         .y = scratch.y,
                                         .dot_z = dot_z});
  weight_gradient<Engine, E>(engine, d_h_next, y, gradients.down, add);

  // B2
  normed_product_backward<Engine, E>(engine, weights.gate_up, {h_mid, tape.inv_rms_mid}, dot_z, scratch.mean_dot,
                                     d_gate_up, d_h_next, d_h_mid);
  weight_gradient<Engine, E>(engine, d_gate_up, h_mid, gradients.gate_up, add);

  // B1
  gemm(engine, d_h_mid_stored, transpose(weights.o), Store<Tensors<E>>{.out = d_attention});
  weight_gradient<Engine, E>(engine, d_h_mid_stored, attention, gradients.o, add);
}

template <class Engine, class E>
void qkv_backward(Engine& engine, const Places<Engine>& places, const LayerWeights<E>& weights, Stream<const E> in,
                  Matrix<const E> qkv, const LayerScratch<E>& scratch, Matrix<const E> d_qkv, Matrix<E> d_products,
                  Matrix<const E> d_residual, Matrix<E> d_h, Matrix<float> d_weight, bool add) {
  const Matrix<const E> d_out = d_products;
  const Matrix<float> dot_qkv = row_slots(scratch.partial, d_qkv.rows, d_qkv.cols);
  map(engine, d_qkv,
      RopeBackward<Tensors<E>>{.inv_rms = in.inv_rms,
                               .position = places.positions,
                               .turns_high = places.turns_high,
                               .turns_low = places.turns_low,
                               .qkv = qkv,
                               .d_qkv = d_products,
                               .dot = dot_qkv});
  normed_product_backward<Engine, E>(engine, weights.qkv, in, dot_qkv, scratch.mean_dot, d_out, d_residual, d_h);
  weight_gradient<Engine, E>(engine, d_out, in.h, d_weight, add);
}

template <class Engine, class E>
void layer_backward(Engine& engine, const Config& config, const Places<Engine>& places, const LayerWeights<E>& weights,
                    Stream<const E> in, LayerTape<Engine, E>& tape, LayerWorkspace<Engine, E>& workspace, Matrix<E> d_h,
                    const LayerGradients& gradients, bool add) {
  const int64_t m = d_h.rows;
  const Matrix<E> qkv = tape.qkv.top(m), attention = tape.attention.top(m), d_h_mid = workspace.d_h_mid.top(m),
                  d_attention = workspace.d_attention.top(m), d_qkv = workspace.d_qkv.top(m);
  const LayerScratch<E> scratch = workspace.scratch(m, true);
  mlp_backward<Engine, E>(engine, weights, attention, tape.mlp(m, true), scratch, d_h, d_h_mid, d_attention, gradients,
                          add);
  attention_backward<E>(engine, attention_shape(config), places.documents, qkv, attention, d_attention,
                        Matrix<const float>{tape.log_sum_exp.matrix().data, config.heads, m}, d_qkv);
  qkv_backward<Engine, E>(engine, places, weights, in, qkv, scratch, d_qkv, d_qkv, d_h_mid, d_h, gradients.qkv, add);
}

#define CODA_LAYER(Engine, E)                                                                                          \
  template struct LayerTape<Engine, E>;                                                                                \
  template struct LayerWorkspace<Engine, E>;                                                                           \
  template void qkv_forward(Engine&, const Places<Engine>&, const LayerWeights<E>&, Stream<const E>, Matrix<E>);       \
  template void mlp_forward(Engine&, double, const LayerWeights<E>&, Matrix<const E>, Matrix<const E>,                 \
                            const MlpTape<E>&, const LayerScratch<E>&, Stream<E>);                                     \
  template void layer_forward(Engine&, const Config&, const Places<Engine>&, const LayerWeights<E>&, Stream<const E>,  \
                              LayerTape<Engine, E>&, LayerWorkspace<Engine, E>&, bool, Stream<E>);                     \
  template void mlp_backward(Engine&, const LayerWeights<E>&, Matrix<const E>, const MlpTape<E>&,                      \
                             const LayerScratch<E>&, Matrix<const E>, Matrix<E>, Matrix<E>, const LayerGradients&,     \
                             bool);                                                                                    \
  template void qkv_backward(Engine&, const Places<Engine>&, const LayerWeights<E>&, Stream<const E>, Matrix<const E>, \
                             const LayerScratch<E>&, Matrix<const E>, Matrix<E>, Matrix<const E>, Matrix<E>,           \
                             Matrix<float>, bool);                                                                     \
  template void layer_backward(Engine&, const Config&, const Places<Engine>&, const LayerWeights<E>&, Stream<const E>, \
                               LayerTape<Engine, E>&, LayerWorkspace<Engine, E>&, Matrix<E>, const LayerGradients&,    \
                               bool);                                                                                  \
  template void weight_gradient<Engine, E>(Engine&, Matrix<const E>, Matrix<const E>, Matrix<float>, bool);

}  // namespace coda::llama
