// Tokens to the first stream and back.
#pragma once
#include "layer.h"

namespace coda::llama {

/// out.h[i] = table[token i] rounded to E; out.inv_rms of the rounded row. table [V, d].
template <class E>
void embedding_forward(Cpu& cpu, Matrix<const float> table, Vector<const int32_t> tokens, double rms_eps,
                       Stream<E> out);

/// d_table[token i] += d_h[i], in ascending order of i for every element; stored instead where add is false.
template <class E>
void embedding_backward(Cpu& cpu, Matrix<const E> d_h, Vector<const int32_t> tokens, Matrix<float> d_table, bool add);

}  // namespace coda::llama
