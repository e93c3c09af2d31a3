// The vocabulary loss, forward and backward, a chunk of tokens at a time: logits of all tokens never exist together.
//
//      product      program                                                       stores
//  F5  h W̃lmᵀ       l = r⊙acc; RowLogSumExp l; RowSum l·[col = label]              partials; the chunk's relative logits
//  B5  elementwise  dl = (exp(l − lse) − [col = label])·d_loss; RowSum dl·l        r·dl, in place
//      dl' W̃lm      d_h = acc − r²·s·h                                             d_h
//  W   dl'ᵀ h                                                                      gradient of the folded weight
#pragma once
#include "coda/operands.h"
#include "layer.h"

namespace coda::llama {

inline constexpr int32_t kIgnored = -100;  // a target that does not count

/// Tokens of a chunk: as many as keep its logits near 64 MB, at least 16.
int64_t vocabulary_chunk(int64_t vocab, int64_t tokens, int64_t bytes_per_logit);

template <class E>
struct VocabularyWorkspace {
  VocabularyWorkspace(const Config& config, int64_t tokens);
  int64_t chunk;
  Buffer<E> logits;           // [chunk, V]
  Buffer<float> maxima;       // [V/128, chunk]
  Buffer<MaxSum> states;      // [V/128, chunk]
  Buffer<float> partial;      // [V/128, chunk]
  Buffer<float> log_sum_exp;  // [chunk]
  Buffer<float> label_logit;  // [chunk]
  Buffer<float> d_loss;       // [chunk]
  Buffer<float> mean_dot;     // [chunk]
};

/// Sum over the counted targets of -log p(target). Targets are in [0, V) or kIgnored.
template <class E>
double vocabulary_loss(Cpu& cpu, const Config& config, Stream<const E> in, Matrix<const E> lm_head,
                       Vector<const int32_t> targets, VocabularyWorkspace<E>& workspace);

/// The same, and its gradient for d_loss = scale at every counted target: d_h is written, d_lm_head (+)=.
template <class E>
double vocabulary_loss_backward(Cpu& cpu, const Config& config, Stream<const E> in, Matrix<const E> lm_head,
                                Vector<const int32_t> targets, float scale, VocabularyWorkspace<E>& workspace,
                                Matrix<E> d_h, Matrix<float> d_lm_head, bool add);

}  // namespace coda::llama
