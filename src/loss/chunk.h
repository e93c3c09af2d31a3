// A chunk of tokens of the vocabulary loss: its memory, and the products and programs over it, on any engine.
#pragma once
#include <algorithm>
#include <type_traits>

#include "coda/finish.h"
#include "coda/loss.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "operand_shape.h"

namespace coda::detail {

/// Memory for chunks of up to so many tokens.
template <class E>
struct ChunkMemory {
  int64_t tokens = 0;
  Matrix<E> logits;                                         // [tokens, V]  once there is a gradient to make
  float* maxima = nullptr;                                  // [V/128, tokens]
  float* partial = nullptr;                                 // [V/128, tokens]
  float* logit_partial = nullptr;                           // [V/128, tokens]
  MaxSum* states = nullptr;                                 // [V/128, tokens]
  Vector<const float> ones;                                 // [tokens]  inv_rms where there is none
  Vector<float> log_sum_exp;                                // [tokens]
  Vector<float> d_log_sum_exp, d_label_logit, d_logit_sum;  // [tokens]
  Vector<float> mean_dot;                                   // [tokens]
};

/// Tokens [first, first + count), and the views of the memory that belong to them.
template <class E>
struct Chunk {
  int64_t first, count;
  Matrix<const E> h, weight;
  bool norm;  // in front
  Vector<const float> inv_rms;
  Vector<const int32_t> label;
  Matrix<E> logits;
  Matrix<float> maxima, partial, logit_partial;
  Matrix<MaxSum> states;
  Vector<float> log_sum_exp, d_log_sum_exp, d_label_logit, d_logit_sum, mean_dot;

  Chunk(const LinearHead<E>& head, int64_t first_, const ChunkMemory<E>& memory)
      : first(first_),
        count(std::min(memory.tokens, head.h.rows - first_)),
        h(head.h.row_range(first_, count)),
        weight(head.weight),
        norm(head.inv_rms.size > 0),
        inv_rms(norm ? head.inv_rms.data + first_ : memory.ones.data, count),
        label(head.label.data + first_, count),
        logits(memory.logits.data, memory.logits.data == nullptr ? 0 : count, head.weight.rows, memory.logits.stride),
        log_sum_exp(memory.log_sum_exp.data, count),
        d_log_sum_exp(memory.d_log_sum_exp.data, count),
        d_label_logit(memory.d_label_logit.data, count),
        d_logit_sum(memory.d_logit_sum.data, count),
        mean_dot(memory.mean_dot.data, count) {
    const int64_t slots = row_slot_count(head.weight.rows);
    maxima = {memory.maxima, slots, count};
    partial = {memory.partial, slots, count};
    logit_partial = {memory.logit_partial, slots, count};
    states = {memory.states, slots, count};
  }
};

/// body(chunk) for all chunks in order. One chunk of no tokens where there are none.
template <class E, class Body>
void for_chunks(const LinearHead<E>& head, const ChunkMemory<E>& memory, const Body& body) {
  int64_t first = 0;
  do {
    const Chunk<E> chunk(head, first, memory);
    body(chunk);
    first += chunk.count;
  } while (first < head.h.rows);
}

/// body(f, LogitSum{}) with the program options that belong to the caller's.
template <class Body>
void with_program_options(const CrossEntropyOptions& options, const Body& body) {
  const auto with_sum = [&](auto f) {
    if (options.label_smoothing > 0)
      body(f, WithLogitSum{});
    else
      body(f, WithoutLogitSum{});
  };
  if (options.softcap)
    with_sum(SoftCapped{static_cast<float>(*options.softcap)});
  else
    with_sum(Uncapped{});
}

/// F5: the partials of states, of the labels' logits (partial) and, where they are smoothed, of all logits.
template <class Keep, class Engine, class E>
void chunk_statistics(Engine& engine, const Chunk<E>& chunk, const CrossEntropyOptions& options) {
  with_program_options(options, [&]<class Cap, class LogitSum>(Cap f, LogitSum) {
    CrossEntropy<Tensors<E>, Keep, Cap, LogitSum> program{.f = f,
                                                          .inv_rms = chunk.inv_rms,
                                                          .label = chunk.label,
                                                          .log_sum_exp = chunk.states,
                                                          .label_logit = chunk.partial};
    if constexpr (Keep::value) {
      program.maxima = chunk.maxima;
      program.relative_logits = chunk.logits;
    }
    if constexpr (LogitSum::value) program.logit_sum = chunk.logit_partial;
    gemm(engine, chunk.h, chunk.weight, program);
  });
}

/// B5, and the products of d_h and W. The derivatives are there, and log_sum_exp [count]; with KeepLogits so are the logits.
template <class Keep, class Engine, class E>
void chunk_gradients(Engine& engine, const Chunk<E>& chunk, const CrossEntropyOptions& options,
                     Vector<const float> log_sum_exp, const LinearHeadGradients<E>& gradients) {
  with_program_options(options, [&]<class Cap, class LogitSum>(Cap f, LogitSum) {
    CrossEntropyBackward<Tensors<E>, Keep, Cap, LogitSum> program{.f = f,
                                                                  .inv_rms = chunk.inv_rms,
                                                                  .label = chunk.label,
                                                                  .log_sum_exp = log_sum_exp,
                                                                  .d_log_sum_exp = chunk.d_log_sum_exp,
                                                                  .d_label_logit = chunk.d_label_logit,
                                                                  .d_logits = chunk.logits,
                                                                  .dot = chunk.partial};
    if constexpr (LogitSum::value) program.d_logit_sum = chunk.d_logit_sum;
    if constexpr (Keep::value) {
      program.maxima = chunk.maxima;
      map(engine, chunk.logits, program);
    } else {
      gemm(engine, chunk.h, chunk.weight, program);
    }
  });
  const Matrix<E> d_h = gradients.d_h.row_range(chunk.first, chunk.count);
  if (chunk.norm) {
    mean_dot(engine, chunk.partial, chunk.h.cols, chunk.mean_dot);
    gemm(engine, chunk.logits, transpose(chunk.weight),
         RmsNormBackward<Tensors<E>, StreamEnds>{
             .inv_rms = chunk.inv_rms, .mean_dot = chunk.mean_dot, .h = chunk.h, .d_h = d_h});
  } else {
    gemm(engine, chunk.logits, transpose(chunk.weight), Store<Tensors<E>>{.out = d_h});
  }
  using StoreFloat = std::conditional_t<std::is_same_v<E, float>, Store<Tensors<float>>, Store<Tensors<E>, float>>;
  if (gradients.add || chunk.first > 0)
    gemm(engine, transpose(chunk.logits), transpose(chunk.h), AccumulateInto<Tensors<E>>{.out = gradients.d_weight});
  else
    gemm(engine, transpose(chunk.logits), transpose(chunk.h), StoreFloat{.out = gradients.d_weight});
}

}  // namespace coda::detail
