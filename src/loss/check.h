// What the vocabulary loss refuses, on every engine, before anything is written. Labels are the engine's to look at.
#pragma once
#include "coda/loss.h"

namespace coda::detail {

/// Throws UsageError.
void check_options(const CrossEntropyOptions& options);

/// Options, and the shapes of the head. Throws OperandError, as the others.
template <class E>
void check_head(const LinearHead<E>& head, const CrossEntropyOptions& options);

void check_tokens(const TokenLosses& tokens, int64_t m);
void check_log_sum_exp(Vector<const float> log_sum_exp, int64_t m);

/// Also OverlapError: a gradient shares memory with an input.
template <class E>
void check_gradients(const LinearHead<E>& head, const CrossEntropyOptions& options, Vector<const float> d_loss,
                     const LinearHeadGradients<E>& gradients);

}  // namespace coda::detail
