#include "coda/loss.h"

#include <fmt/format.h>

#include <algorithm>

#include "buffer.h"
#include "check.h"
#include "chunk.h"
#include "coda/error.h"
#include "coda/gemm.h"
#include "token_loss.h"

namespace coda {

using detail::Chunk;
using detail::TokenLoss;

namespace {

constexpr int64_t kLogitBytes = int64_t{64} << 20;

template <class E>
void check_labels(const LinearHead<E>& head, const CrossEntropyOptions& options) {
  const int64_t vocab = head.weight.rows;
  for (int64_t i = 0; i < head.label.size; ++i) {
    const int32_t label = head.label[i];
    if ((label < 0 || label >= vocab) && label != options.ignore_index)
      throw OperandError(fmt::format("label of row {}", i), fmt::format("{}", label),
                         fmt::format("an id from 0 to {}, or {} to be ignored", vocab - 1, options.ignore_index));
  }
}

/// What the reduction divides by.
double divisor_of(const TokenLoss& token_loss, const CrossEntropyOptions& options) {
  if (options.reduction != Reduction::mean) return 1;
  if (options.divisor) return *options.divisor;
  double sum = 0;
  for (int64_t i = 0; i < token_loss.tokens(); ++i)
    if (token_loss.counts(i)) sum += token_loss.weight(i);
  return sum;
}

}  // namespace

template <class E>
struct LinearCrossEntropy<E>::Memory {
  int64_t vocab = 0;
  Buffer<E> logits;                                         // [chunk, V]
  Buffer<float> maxima, partial, logit_partial;             // [V/128, chunk]
  Buffer<MaxSum> states;                                    // [V/128, chunk]
  Buffer<float> ones;                                       // [chunk]
  Buffer<float> log_sum_exp, label_logit, logit_sum;        // [chunk]
  Buffer<float> d_log_sum_exp, d_label_logit, d_logit_sum;  // [chunk]
  Buffer<float> mean_dot;                                   // [chunk]
  detail::ChunkMemory<E> chunk;

  void reserve(int64_t vocab_, int64_t tokens, bool gradients) {
    const int64_t needed = chunk_tokens(vocab_, tokens);
    if (vocab != vocab_ || chunk.tokens < needed) {
      vocab = vocab_;
      logits = {};
      const int64_t slots = detail::row_slot_count(vocab);
      for (Buffer<float>* partials : {&maxima, &partial, &logit_partial}) *partials = {slots, needed};
      states = {slots, needed};
      for (Buffer<float>* row :
           {&ones, &log_sum_exp, &label_logit, &logit_sum, &d_log_sum_exp, &d_label_logit, &d_logit_sum, &mean_dot})
        *row = {1, needed};
      std::ranges::fill(ones.span(), 1.f);
      chunk = {.tokens = needed,
               .logits = {},
               .maxima = maxima.matrix().data,
               .partial = partial.matrix().data,
               .logit_partial = logit_partial.matrix().data,
               .states = states.matrix().data,
               .ones = ones.vector(),
               .log_sum_exp = log_sum_exp.vector(),
               .d_log_sum_exp = d_log_sum_exp.vector(),
               .d_label_logit = d_label_logit.vector(),
               .d_logit_sum = d_logit_sum.vector(),
               .mean_dot = mean_dot.vector()};
    }
    if (gradients && logits.rows() == 0) {
      logits = {chunk.tokens, vocab};
      chunk.logits = logits.matrix();
    }
  }

  /// F5 and its second stage.
  template <class Keep>
  void statistics(Cpu& cpu, const Chunk<E>& of, const CrossEntropyOptions& options) {
    detail::chunk_statistics<Keep>(cpu, of, options);
    coda::log_sum_exp(cpu, of.states, of.log_sum_exp);
    total(cpu, of.partial, label_logit.vector(of.count));
    if (options.label_smoothing > 0) total(cpu, of.logit_partial, logit_sum.vector(of.count));
  }

  void losses(const Chunk<E>& of, const TokenLoss& token_loss, const TokenLosses& tokens, LossValue& value) const {
    for (int64_t i = 0; i < of.count; ++i) {
      const int64_t token = of.first + i;
      const double sum = token_loss.takes_logit_sum() ? static_cast<double>(logit_sum.matrix()(0, i)) : 0;
      const TokenLoss::Loss loss = token_loss.loss(token, static_cast<double>(of.log_sum_exp[i]),
                                                   static_cast<double>(label_logit.matrix()(0, i)), sum);
      value.sum += loss.all;
      value.z_sum += loss.z;
      if (tokens.loss.size > 0) tokens.loss[token] = static_cast<float>(loss.all);
      if (tokens.z_loss.size > 0) tokens.z_loss[token] = static_cast<float>(loss.z);
      if (tokens.log_sum_exp.size > 0) tokens.log_sum_exp[token] = of.log_sum_exp[i];
    }
  }
};

namespace {

/// From the chunk's log_sum_exp [count] on.
template <class Keep, class E>
void gradients_of(Cpu& cpu, const Chunk<E>& chunk, const TokenLoss& token_loss, const CrossEntropyOptions& options,
                  Vector<const float> log_sum_exp, Vector<const float> d_loss, double divisor,
                  const LinearHeadGradients<E>& gradients) {
  for (int64_t i = 0; i < chunk.count; ++i) {
    const auto d = token_loss.derivatives(chunk.first + i, static_cast<double>(log_sum_exp[i]), d_loss, divisor);
    chunk.d_log_sum_exp[i] = d.log_sum_exp;
    chunk.d_label_logit[i] = d.label_logit;
    chunk.d_logit_sum[i] = d.logit_sum;
  }
  detail::chunk_gradients<Keep>(cpu, chunk, options, log_sum_exp, gradients);
}

}  // namespace

template <class E>
LinearCrossEntropy<E>::LinearCrossEntropy() : memory_(std::make_unique<Memory>()) {}
template <class E>
LinearCrossEntropy<E>::~LinearCrossEntropy() = default;
template <class E>
LinearCrossEntropy<E>::LinearCrossEntropy(LinearCrossEntropy&&) noexcept = default;
template <class E>
LinearCrossEntropy<E>& LinearCrossEntropy<E>::operator=(LinearCrossEntropy&&) noexcept = default;

template <class E>
int64_t LinearCrossEntropy<E>::chunk_tokens(int64_t vocab, int64_t tokens) {
  const int64_t row_bytes = std::max<int64_t>(1, vocab) * static_cast<int64_t>(sizeof(E));
  return std::clamp<int64_t>(kLogitBytes / row_bytes / 16 * 16, 16, std::max<int64_t>(16, tokens));
}

template <class E>
LossValue LinearCrossEntropy<E>::forward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                                         const TokenLosses& tokens) {
  detail::check_head(head, options);
  check_labels(head, options);
  detail::check_tokens(tokens, head.h.rows);
  memory_->reserve(head.weight.rows, head.h.rows, false);
  const TokenLoss token_loss(head, options);
  LossValue value{.divisor = divisor_of(token_loss, options)};
  detail::for_chunks(head, memory_->chunk, [&](const Chunk<E>& chunk) {
    memory_->template statistics<RecomputeLogits>(cpu, chunk, options);
    memory_->losses(chunk, token_loss, tokens, value);
  });
  return value;
}

template <class E>
void LinearCrossEntropy<E>::backward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                                     Vector<const float> log_sum_exp, Vector<const float> d_loss,
                                     const LinearHeadGradients<E>& gradients) {
  detail::check_head(head, options);
  check_labels(head, options);
  detail::check_log_sum_exp(log_sum_exp, head.h.rows);
  detail::check_gradients(head, options, d_loss, gradients);
  memory_->reserve(head.weight.rows, head.h.rows, true);
  const TokenLoss token_loss(head, options);
  const double divisor = divisor_of(token_loss, options);
  detail::for_chunks(head, memory_->chunk, [&](const Chunk<E>& chunk) {
    gradients_of<RecomputeLogits>(cpu, chunk, token_loss, options, {log_sum_exp.data + chunk.first, chunk.count},
                                  d_loss, divisor, gradients);
  });
}

template <class E>
LossValue LinearCrossEntropy<E>::forward_backward(Cpu& cpu, const LinearHead<E>& head,
                                                  const CrossEntropyOptions& options, Vector<const float> d_loss,
                                                  const LinearHeadGradients<E>& gradients, const TokenLosses& tokens) {
  detail::check_head(head, options);
  check_labels(head, options);
  detail::check_tokens(tokens, head.h.rows);
  detail::check_gradients(head, options, d_loss, gradients);
  memory_->reserve(head.weight.rows, head.h.rows, true);
  const TokenLoss token_loss(head, options);
  LossValue value{.divisor = divisor_of(token_loss, options)};
  detail::for_chunks(head, memory_->chunk, [&](const Chunk<E>& chunk) {
    memory_->template statistics<KeepLogits>(cpu, chunk, options);
    memory_->losses(chunk, token_loss, tokens, value);
    gradients_of<KeepLogits>(cpu, chunk, token_loss, options, chunk.log_sum_exp, d_loss, value.divisor, gradients);
  });
  return value;
}

template class LinearCrossEntropy<float>;
template class LinearCrossEntropy<bf16>;

}  // namespace coda
