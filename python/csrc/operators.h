// The operators. Shapes, types and mathematics are in the docstrings of python/coda_torch; `mask` has a bit for each gradient that is
// asked for, in the order of the parameters, and what is not asked for is an empty tensor.
#pragma once
#include <optional>
#include <tuple>

#include "tensor.h"

namespace coda::torch_ops {

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors10 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors16 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                             Tensor, Tensor, Tensor, Tensor, Tensor>;

/// bq, bk, bv: all of them, or none. q_norm, k_norm: both, and then no bias, or none. glu: with_glu's (glu.h).
Tensors7 block(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down,
               Tensor gamma_attention, Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq,
               std::optional<Tensor> bk, std::optional<Tensor> bv, std::optional<Tensor> q_norm,
               std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim, int64_t glu, double eps,
               bool keep);
Tensors16 block_backward(Tensor d_h_next, Tensor d_qkv, Tensor a, Tensor h_next, Tensor qkv, Tensor inv_rms_next,
                         Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor unnormed, Tensor wo, Tensor gamma_mlp,
                         Tensor w_gate, Tensor w_up, Tensor w_down, Tensor gamma_attention, Tensor wq, Tensor wk,
                         Tensor wv, std::optional<Tensor> bq, std::optional<Tensor> bk, std::optional<Tensor> bv,
                         std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor position, Tensor turns,
                         int64_t head_dim, int64_t glu, double eps, int64_t mask);
Tensors4 block_tail(Tensor a, Tensor h, Tensor wo, Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down,
                    int64_t glu, double eps, bool keep);
Tensors7 block_tail_backward(Tensor d_h_next, Tensor a, Tensor h_mid, Tensor inv_rms_mid, Tensor gate_up, Tensor wo,
                             Tensor gamma_mlp, Tensor w_gate, Tensor w_up, Tensor w_down, int64_t glu, int64_t mask);

Tensors3 norm_linear_rope(Tensor h, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq,
                          std::optional<Tensor> bk, std::optional<Tensor> bv, std::optional<Tensor> q_norm,
                          std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim, double eps,
                          bool keep);
Tensors10 norm_linear_rope_backward(Tensor d_qkv, Tensor h, Tensor qkv, Tensor inv_rms, Tensor unnormed, Tensor gamma,
                                    Tensor wq, Tensor wk, Tensor wv, std::optional<Tensor> bq, std::optional<Tensor> bk,
                                    std::optional<Tensor> bv, std::optional<Tensor> q_norm,
                                    std::optional<Tensor> k_norm, Tensor position, Tensor turns, int64_t head_dim,
                                    double eps, int64_t mask);
/// Without gamma there is no norm.
Tensors3 norm_linear_glu(Tensor h, std::optional<Tensor> gamma, Tensor w_gate, Tensor w_up, int64_t glu, double limit,
                         double alpha, double eps, bool keep);
Tensors4 norm_linear_glu_backward(Tensor d_y, Tensor h, Tensor gate_up, Tensor inv_rms, std::optional<Tensor> gamma,
                                  Tensor w_gate, Tensor w_up, int64_t glu, double limit, double alpha, int64_t mask);
Tensor linear_residual(Tensor x, Tensor weight, Tensor residual);
Tensors2 linear_residual_backward(Tensor d_h, Tensor x, Tensor weight, int64_t mask);

/// x weightᵀ; its derivative is linear_residual's.
Tensor linear(Tensor x, Tensor weight);

/// h = x + residual, and r of its rows.
Tensors2 add_inv_rms(Tensor x, Tensor residual, double eps);
/// norm_linear_rope where r is known; its derivative is norm_linear_rope's.
Tensor stream_qkv(Tensor h, Tensor inv_rms, Tensor gamma, Tensor wq, Tensor wk, Tensor wv, Tensor position,
                  Tensor turns, int64_t head_dim);
/// swiglu(norm(h)) w_downᵀ where r is known.
Tensors2 stream_mlp(Tensor h, Tensor inv_rms, Tensor gamma, Tensor w_gate, Tensor w_up, Tensor w_down, bool keep);
Tensors5 stream_mlp_backward(Tensor d_out, Tensor h, Tensor inv_rms, Tensor gate_up, Tensor gamma, Tensor w_gate,
                             Tensor w_up, Tensor w_down, int64_t mask);

/// x [M, K], float32 or bfloat16, times scale [K] in each row, rounded once to bfloat16.
Tensor scaled_to_bf16(Tensor x, Tensor scale);

/// main_grad += d_outᵀ x.
void accumulate_weight_gradient_(Tensor main_grad, Tensor d_out, Tensor x);

Tensors5 linear_cross_entropy(Tensor x, Tensor weight, Tensor label, std::optional<Tensor> token_weight,
                              int64_t reduction, std::optional<double> divisor, int64_t ignore_index,
                              double label_smoothing, double z_loss, std::optional<double> softcap, int64_t mask);
Tensors2 linear_cross_entropy_backward(Tensor d_loss, Tensor x, Tensor weight, Tensor label,
                                       std::optional<Tensor> token_weight, Tensor log_sum_exp, int64_t reduction,
                                       std::optional<double> divisor, int64_t ignore_index, double label_smoothing,
                                       double z_loss, std::optional<double> softcap);

}  // namespace coda::torch_ops
