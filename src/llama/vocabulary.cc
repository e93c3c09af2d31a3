#include "vocabulary.h"

#include <algorithm>

#include "coda/finish.h"
#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"

namespace coda::llama {

namespace {

constexpr int64_t kSlot = 128;
constexpr int64_t kLogitBytes = int64_t{64} << 20;

int64_t slots(int64_t vocab) {
  return (vocab + kSlot - 1) / kSlot;
}

/// A chunk's rows and the views of the workspace that belong to it.
template <class E>
struct Chunk {
  Matrix<const E> h;
  Vector<const float> inv_rms;
  Vector<const int32_t> labels;
  Matrix<E> logits;
  Matrix<float> maxima, partial;
  Matrix<MaxSum> states;
  Vector<float> log_sum_exp, label_logit;

  Chunk(Stream<const E> in, Vector<const int32_t> targets, int64_t first, int64_t vocab, VocabularyWorkspace<E>& w) {
    const int64_t count = std::min(w.chunk, in.h.rows - first);
    h = in.h.row_range(first, count);
    inv_rms = {in.inv_rms.data + first, count};
    labels = {targets.data + first, count};
    logits = w.logits.top(count);
    maxima = {w.maxima.matrix().data, slots(vocab), count};
    partial = {w.partial.matrix().data, slots(vocab), count};
    states = {w.states.matrix().data, slots(vocab), count};
    log_sum_exp = w.log_sum_exp.vector(count);
    label_logit = w.label_logit.vector(count);
  }

  /// Σ of the counted tokens' losses, after F5.
  double finish_loss(Cpu& cpu) {
    coda::log_sum_exp(cpu, states, log_sum_exp);
    total(cpu, partial, label_logit);
    double sum = 0;
    for (int64_t i = 0; i < labels.size; ++i)
      if (labels[i] != kIgnored) sum += static_cast<double>(log_sum_exp[i]) - static_cast<double>(label_logit[i]);
    return sum;
  }
};

}  // namespace

int64_t vocabulary_chunk(int64_t vocab, int64_t tokens, int64_t bytes_per_logit) {
  const int64_t fitting = kLogitBytes / (vocab * bytes_per_logit) / 16 * 16;
  return std::clamp<int64_t>(fitting, 16, std::max<int64_t>(16, tokens));
}

template <class E>
VocabularyWorkspace<E>::VocabularyWorkspace(const Config& config, int64_t tokens)
    : chunk(vocabulary_chunk(config.vocab, tokens, sizeof(E))),
      logits(chunk, config.vocab),
      maxima(slots(config.vocab), chunk),
      states(slots(config.vocab), chunk),
      partial(slots(config.vocab), chunk),
      log_sum_exp(1, chunk),
      label_logit(1, chunk),
      d_loss(1, chunk),
      mean_dot(1, chunk) {}

template <class E>
double vocabulary_loss(Cpu& cpu, const Config& config, Stream<const E> in, Matrix<const E> lm_head,
                       Vector<const int32_t> targets, VocabularyWorkspace<E>& workspace) {
  double loss = 0;
  for (int64_t first = 0; first < in.h.rows; first += workspace.chunk) {
    Chunk<E> chunk(in, targets, first, config.vocab, workspace);
    gemm(cpu, chunk.h, lm_head,
         CrossEntropy<Tensors<E>, RecomputeLogits>{.inv_rms = chunk.inv_rms,
                                                   .label = chunk.labels,
                                                   .log_sum_exp = chunk.states,
                                                   .label_logit = chunk.partial});
    loss += chunk.finish_loss(cpu);
  }
  return loss;
}

template <class E>
double vocabulary_loss_backward(Cpu& cpu, const Config& config, Stream<const E> in, Matrix<const E> lm_head,
                                Vector<const int32_t> targets, float scale, VocabularyWorkspace<E>& workspace,
                                Matrix<E> d_h, Matrix<float> d_lm_head, bool add) {
  double loss = 0;
  for (int64_t first = 0; first < in.h.rows; first += workspace.chunk) {
    Chunk<E> chunk(in, targets, first, config.vocab, workspace);
    const int64_t count = chunk.h.rows;
    // F5
    gemm(cpu, chunk.h, lm_head,
         CrossEntropy<Tensors<E>>{.inv_rms = chunk.inv_rms,
                                  .label = chunk.labels,
                                  .maxima = chunk.maxima,
                                  .relative_logits = chunk.logits,
                                  .log_sum_exp = chunk.states,
                                  .label_logit = chunk.partial});
    loss += chunk.finish_loss(cpu);
    // B5
    const Vector<float> d_loss = workspace.d_loss.vector(count), s = workspace.mean_dot.vector(count);
    for (int64_t i = 0; i < count; ++i) d_loss[i] = chunk.labels[i] == kIgnored ? 0.f : scale;
    map(cpu, chunk.logits,
        CrossEntropyBackward<Tensors<E>>{.inv_rms = chunk.inv_rms,
                                         .label = chunk.labels,
                                         .log_sum_exp = chunk.log_sum_exp,
                                         .d_loss = d_loss,
                                         .maxima = chunk.maxima,
                                         .d_logits = chunk.logits,
                                         .dot = chunk.partial});
    mean_dot(cpu, chunk.partial, config.hidden, s);
    gemm(cpu, chunk.logits, transpose(lm_head),
         RmsNormBackward<Tensors<E>, StreamEnds>{
             .inv_rms = chunk.inv_rms, .mean_dot = s, .h = chunk.h, .d_h = d_h.row_range(first, count)});
    // W
    weight_gradient<E>(cpu, chunk.logits, chunk.h, d_lm_head, add || first > 0);
  }
  return loss;
}

#define CODA_VOCABULARY(E)                                                                                      \
  template struct VocabularyWorkspace<E>;                                                                       \
  template double vocabulary_loss(Cpu&, const Config&, Stream<const E>, Matrix<const E>, Vector<const int32_t>, \
                                  VocabularyWorkspace<E>&);                                                     \
  template double vocabulary_loss_backward(Cpu&, const Config&, Stream<const E>, Matrix<const E>,               \
                                           Vector<const int32_t>, float, VocabularyWorkspace<E>&, Matrix<E>,    \
                                           Matrix<float>, bool);
CODA_VOCABULARY(float)
CODA_VOCABULARY(bf16)
#undef CODA_VOCABULARY

}  // namespace coda::llama
