// What the vocabulary loss on a GPU does with one token's statistics: losses, their sum, and their derivatives.
#pragma once
#include "coda/gpu.h"
#include "loss/chunk.h"
#include "loss/token_loss.h"
#include "loss_memory.h"

namespace coda::hopper {

void fill_ones(const Gpu& gpu, Vector<float> x);

/// *divisor, on the device: what the reduction divides by.
void loss_divisor(const Gpu& gpu, const coda::detail::TokenLoss& token_loss, const CrossEntropyOptions& options,
                  double* divisor);

/// The second stage of a chunk's statistics: its log_sum_exp, the outputs of its tokens, their sums at sums [⌈M/32⌉], and, where
/// d_loss is not empty, the losses' derivatives. The chunk begins at a multiple of kLossTokens.
void token_losses(const Gpu& gpu, const coda::detail::TokenLoss& token_loss, const coda::detail::Chunk<bf16>& chunk,
                  const TokenLosses& tokens, LossSums* sums, Vector<const float> d_loss, const double* divisor);

/// The losses' derivatives only, from the chunk's part of a log-sum-exp that is there.
void token_derivatives(const Gpu& gpu, const coda::detail::TokenLoss& token_loss,
                       const coda::detail::Chunk<bf16>& chunk, Vector<const float> log_sum_exp,
                       Vector<const float> d_loss, const double* divisor);

/// *value from the sums of all tokens.
void sum_losses(const Gpu& gpu, const LossSums* sums, int64_t tokens, const double* divisor, LossValue* value);

}  // namespace coda::hopper
