// Tokens to the first stream and back, on a GPU.
#pragma once
#include "coda/gpu.h"
#include "llama/layer.h"

namespace coda::hopper {

/// out.h[i] = table[token i] rounded to bf16; out.inv_rms of the rounded row. table [V, d]; every token is in [0, V).
void embedding_forward(const Gpu& gpu, Matrix<const float> table, Vector<const int32_t> tokens, double rms_eps,
                       llama::Stream<bf16> out);

/// Bytes of gpu's workspace that embedding_backward needs for this many tokens.
int64_t embedding_backward_workspace(const Gpu& gpu, int64_t tokens);

/// d_table[token i] += d_h[i], in ascending order of i for every element; stored instead where add is false. d_h [M,
/// d]. Throws OperandError for sizes that do not fit and a workspace that is too small.
void embedding_backward(const Gpu& gpu, Matrix<const bf16> d_h, Vector<const int32_t> tokens, Matrix<float> d_table,
                        bool add);

}  // namespace coda::hopper
