// The operators' schemas. coda_torch/operators.py has their fake kernels and their derivatives.
#include "operators.h"

STABLE_TORCH_LIBRARY(coda, m) {
  m.def(
      "block(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down, "
      "Tensor gamma_attention, Tensor wq, Tensor wk, Tensor wv, Tensor? bq, Tensor? bk, Tensor? bv, Tensor? q_norm, "
      "Tensor? k_norm, Tensor position, Tensor turns, int head_dim, int glu, float eps, bool keep) -> (Tensor h_next, "
      "Tensor qkv, Tensor inv_rms_next, Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor unnormed)");
  m.def(
      "block_backward(Tensor d_h_next, Tensor d_qkv, Tensor a, Tensor h_next, Tensor qkv, Tensor inv_rms_next, "
      "Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor unnormed, Tensor wo, Tensor gamma_mlp, Tensor w_gate, "
      "Tensor w_up, Tensor w_down, Tensor gamma_attention, Tensor wq, Tensor wk, Tensor wv, Tensor? bq, Tensor? bk, "
      "Tensor? bv, Tensor? q_norm, Tensor? k_norm, Tensor position, Tensor turns, int head_dim, int glu, float eps, "
      "int mask) "
      "-> (Tensor d_a, Tensor d_h, Tensor d_wo, Tensor d_gamma_mlp, Tensor d_w_gate, Tensor d_w_up, Tensor d_w_down, "
      "Tensor d_gamma_attention, Tensor d_wq, Tensor d_wk, Tensor d_wv, Tensor d_bq, Tensor d_bk, Tensor d_bv, "
      "Tensor d_q_norm, Tensor d_k_norm)");
  m.def(
      "block_tail(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down, "
      "int glu, float eps, bool keep) -> (Tensor h_next, Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up)");
  m.def(
      "block_tail_backward(Tensor d_h_next, Tensor a, Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor wo, "
      "Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down, int glu, int mask) -> (Tensor d_a, Tensor d_h, "
      "Tensor d_wo, "
      "Tensor d_gamma_mlp, Tensor d_w_gate, Tensor d_w_up, Tensor d_w_down)");
  m.def(
      "norm_linear_rope(Tensor h, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, Tensor? bq, Tensor? bk, Tensor? bv, "
      "Tensor? q_norm, Tensor? k_norm, Tensor position, Tensor turns, int head_dim, float eps, bool keep) -> "
      "(Tensor qkv, Tensor inv_rms, Tensor unnormed)");
  m.def(
      "norm_linear_rope_backward(Tensor d_qkv, Tensor h, Tensor qkv, Tensor inv_rms, Tensor unnormed, Tensor gamma, "
      "Tensor wq, Tensor wk, Tensor wv, Tensor? bq, Tensor? bk, Tensor? bv, Tensor? q_norm, Tensor? k_norm, "
      "Tensor position, Tensor turns, int head_dim, float eps, int mask) -> (Tensor d_h, Tensor d_gamma, Tensor d_wq, "
      "Tensor d_wk, Tensor d_wv, Tensor d_bq, Tensor d_bk, Tensor d_bv, Tensor d_q_norm, Tensor d_k_norm)");
  m.def(
      "norm_linear_glu(Tensor h, Tensor? gamma, Tensor w_gate, Tensor w_up, int glu, float limit, float alpha, "
      "float eps, bool keep) -> (Tensor y, Tensor gate_up, Tensor inv_rms)");
  m.def(
      "norm_linear_glu_backward(Tensor d_y, Tensor h, Tensor gate_up, Tensor inv_rms, Tensor? gamma, Tensor w_gate, "
      "Tensor w_up, int glu, float limit, float alpha, int mask) -> (Tensor d_h, Tensor d_gamma, Tensor d_w_gate, "
      "Tensor d_w_up)");
  m.def("linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor");
  m.def("linear_residual_backward(Tensor d_h, Tensor x, Tensor weight, int mask) -> (Tensor d_x, Tensor d_weight)");
  m.def("linear(Tensor x, Tensor weight) -> Tensor");
  m.def("add_inv_rms(Tensor x, Tensor residual, float eps) -> (Tensor h, Tensor inv_rms)");
  m.def(
      "stream_qkv(Tensor h, Tensor inv_rms, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, Tensor position, Tensor "
      "turns, int head_dim) -> Tensor");
  m.def(
      "stream_mlp(Tensor h, Tensor inv_rms, Tensor gamma, Tensor w_gate, Tensor w_up, Tensor w_down, bool keep) -> "
      "(Tensor out, Tensor gate_up)");
  m.def(
      "stream_mlp_backward(Tensor d_out, Tensor h, Tensor inv_rms, Tensor gate_up, Tensor gamma, Tensor w_gate, Tensor "
      "w_up, Tensor w_down, int mask) -> (Tensor d_h, Tensor d_gamma, Tensor d_w_gate, Tensor d_w_up, Tensor "
      "d_w_down)");
  m.def("scaled_to_bf16(Tensor x, Tensor scale) -> Tensor");
  m.def("accumulate_weight_gradient_(Tensor(a!) main_grad, Tensor d_out, Tensor x) -> ()");
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor label, Tensor? token_weight, int reduction, float? "
      "divisor, "
      "int ignore_index, float label_smoothing, float z_loss, float? softcap, int mask) -> (Tensor loss, Tensor "
      "z_loss, "
      "Tensor log_sum_exp, Tensor d_x, Tensor d_weight)");
  m.def(
      "linear_cross_entropy_backward(Tensor d_loss, Tensor x, Tensor weight, Tensor label, Tensor? token_weight, "
      "Tensor log_sum_exp, int reduction, float? divisor, int ignore_index, float label_smoothing, float z_loss, "
      "float? softcap) -> (Tensor d_x, Tensor d_weight)");
}

// Every device: on_engine() says which it serves.
STABLE_TORCH_LIBRARY_IMPL(coda, CompositeExplicitAutograd, m) {
  using namespace coda::torch_ops;
  m.impl("block", TORCH_BOX(&block));
  m.impl("block_backward", TORCH_BOX(&block_backward));
  m.impl("block_tail", TORCH_BOX(&block_tail));
  m.impl("block_tail_backward", TORCH_BOX(&block_tail_backward));
  m.impl("norm_linear_rope", TORCH_BOX(&norm_linear_rope));
  m.impl("norm_linear_rope_backward", TORCH_BOX(&norm_linear_rope_backward));
  m.impl("norm_linear_glu", TORCH_BOX(&norm_linear_glu));
  m.impl("norm_linear_glu_backward", TORCH_BOX(&norm_linear_glu_backward));
  m.impl("linear_residual", TORCH_BOX(&linear_residual));
  m.impl("linear_residual_backward", TORCH_BOX(&linear_residual_backward));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("add_inv_rms", TORCH_BOX(&add_inv_rms));
  m.impl("stream_qkv", TORCH_BOX(&stream_qkv));
  m.impl("stream_mlp", TORCH_BOX(&stream_mlp));
  m.impl("stream_mlp_backward", TORCH_BOX(&stream_mlp_backward));
  m.impl("scaled_to_bf16", TORCH_BOX(&scaled_to_bf16));
  m.impl("accumulate_weight_gradient_", TORCH_BOX(&accumulate_weight_gradient_));
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}
