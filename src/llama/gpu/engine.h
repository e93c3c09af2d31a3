// What the layer's text needs of the GPU engine.
#pragma once
#include "coda/finish.h"
#include "coda/gpu.h"
#include "hopper/attention.h"
#include "hopper/device_memory.h"
#include "llama/layer.h"

namespace coda::llama {

template <>
struct EngineTraits<Gpu> {
  template <class T>
  using Buffer = hopper::DeviceBuffer<T>;
  using Documents = hopper::Attention*;  // made for the batch
};

template <class E>
void attention_forward(Gpu& gpu, const AttentionShape&, hopper::Attention* documents, Matrix<const E> qkv,
                       Matrix<E> out, Matrix<float> log_sum_exp) {
  documents->forward(gpu, qkv, out, log_sum_exp.data);
}
template <class E>
void attention_backward(Gpu& gpu, const AttentionShape&, hopper::Attention* documents, Matrix<const E> qkv,
                        Matrix<const E> out, Matrix<const E> d_out, Matrix<const float> log_sum_exp, Matrix<E> d_qkv) {
  documents->backward(gpu, qkv, out, d_out, log_sum_exp.data, d_qkv);
}

/// In slices of the tokens where that is predicted to pay: weights of few tiles. gpu has weight_gradient_workspace().
template <class A, class B, class P>
void gemm_over_tokens(Gpu& gpu, const A& a, const B& b, const P& program) {
  gemm(gpu, a, b, program, depth_slices(gpu, a, b, program));
}

}  // namespace coda::llama
