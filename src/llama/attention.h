// Causal attention of packed documents, forward and backward, and of one token against a cache.
//
//   s = dh^-1/2 · q kᵀ,  p = softmax(s) over the tokens of the same document up to the query's own,  out = p v
//   d_v = pᵀ d_out,  d_s = p ⊙ (d_out vᵀ − Δ) with Δ = Σ d_out·out,  d_q = dh^-1/2 · d_s k,  d_k = dh^-1/2 · d_sᵀ q
//
// The scores exist in blocks only. Query head j reads key head j / (heads / kv_heads). q and k may come in any order of columns
// within a head that is the same for both (rotated, in pairs); the order of v is the order of out.
#pragma once
#include <cstdint>
#include <span>

#include "coda/cpu.h"
#include "coda/tensor.h"

namespace coda::llama {

struct AttentionShape {
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // a multiple of 16

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

// Documents lie one after the other: document i is tokens [document_starts[i], document_starts[i + 1]), from 0 to M; it may be
// empty. E is float or bf16; arithmetic is fp32, and what is stored is rounded once. Outputs may not overlap inputs. The
// results do not depend on the number of threads. All three throw OperandError before anything is written.

/// log_sum_exp is of the scaled scores, for the backward pass; none is written if its data is null.
template <class E>
void attention_forward(Cpu& cpu, const AttentionShape& shape, std::span<const int64_t> document_starts,
                       Matrix<const E> qkv,         // [M, (heads + 2 kv_heads)·dh], columns q | k | v
                       Matrix<E> out,               // [M, heads·dh]
                       Matrix<float> log_sum_exp);  // [heads, M]

template <class E>
void attention_backward(Cpu& cpu, const AttentionShape& shape, std::span<const int64_t> document_starts,
                        Matrix<const E> qkv,              // [M, (heads + 2 kv_heads)·dh]
                        Matrix<const E> out,              // [M, heads·dh]
                        Matrix<const E> d_out,            // [M, heads·dh]
                        Matrix<const float> log_sum_exp,  // [heads, M]
                        Matrix<E> d_qkv);                 // [M, (heads + 2 kv_heads)·dh]

/// One query token after T - 1 others, against the keys and values of all T of them (T at least 1).
template <class E>
void attention_decode(Cpu& cpu, const AttentionShape& shape,
                      const E* q,         // [heads·dh]
                      Matrix<const E> k,  // [T, kv_heads·dh]
                      Matrix<const E> v,  // [T, kv_heads·dh]
                      E* out);            // [heads·dh]

}  // namespace coda::llama
