#include "hopper/loss_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "coda/error.h"

namespace coda::hopper {

namespace {

/// Of 512 to 16384 tokens these are within 2 % of the fastest at every shape (docs/measurements.md).
constexpr int64_t kMostOfChunk = 4096;

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

LossPieces::LossPieces(Pieces& pieces, const GpuLossSize& size) {
  chunk.tokens = size.chunk_tokens;
  const int64_t slots = coda::detail::row_slot_count(size.vocab) * chunk.tokens;
  ones = pieces.take<float>(chunk.tokens);
  chunk.ones = {ones, chunk.tokens};
  chunk.states = pieces.take<MaxSum>(slots);
  chunk.partial = pieces.take<float>(slots);
  chunk.logit_partial = pieces.take<float>(slots);
  chunk.log_sum_exp = pieces.vector(chunk.tokens);
  sums = pieces.take<LossSums>((size.tokens + kLossTokens - 1) / kLossTokens);
  divisor = pieces.take<double>(1);
  if (!size.gradients) return;
  const int64_t stride = round_up(size.vocab, 8);  // rows that TMA reaches
  chunk.logits = {pieces.take<bf16>(chunk.tokens * stride), chunk.tokens, size.vocab, stride};
  chunk.maxima = pieces.take<float>(slots);
  for (Vector<float>* row : {&chunk.d_log_sum_exp, &chunk.d_label_logit, &chunk.d_logit_sum, &chunk.mean_dot})
    *row = pieces.vector(chunk.tokens);
}

GpuLossSize checked(GpuLossSize size) {
  if (size.tokens < 0) throw UsageError(fmt::format("tokens is {}; it needs to be 0 or more", size.tokens));
  if (size.vocab < 1) throw UsageError(fmt::format("vocab is {}; it needs to be 1 or more", size.vocab));
  if (size.chunk_tokens < 0 || size.chunk_tokens % kLossTokens != 0)
    throw UsageError(
        fmt::format("chunk_tokens is {}; it needs to be a multiple of {}", size.chunk_tokens, kLossTokens));
  if (size.chunk_tokens == 0) size.chunk_tokens = GpuLinearCrossEntropy::chunk_tokens(size.tokens);
  return size;
}

}  // namespace coda::hopper

namespace coda {

int64_t GpuLinearCrossEntropy::memory_bytes(const GpuLossSize& size) {
  hopper::Pieces pieces(nullptr);
  const hopper::LossPieces counted(pieces, hopper::checked(size));
  return pieces.bytes();
}

int64_t GpuLinearCrossEntropy::chunk_tokens(int64_t tokens) {
  const int64_t most = std::max<int64_t>(tokens, 1);
  const int64_t chunks = (most + hopper::kMostOfChunk - 1) / hopper::kMostOfChunk;
  return hopper::round_up((most + chunks - 1) / chunks, 128);
}

}  // namespace coda
