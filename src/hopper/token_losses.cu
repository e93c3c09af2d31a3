// One kernel per chunk: reads the partials of a row once (states twice, from the cache), 16 bytes for 128 logits, and writes
// a few numbers per token. Sums of losses: 32 tokens as a tree, then blocks of them in an order that depends on their
// number only.
#include "hopper/token_losses.h"

#include "hopper/launch.h"
#include "hopper/slots.h"

namespace coda::hopper {

using coda::detail::Chunk;
using coda::detail::TokenLoss;

namespace {

constexpr int kThreads = 1024;
static_assert(kLossTokens == kColumns, "a block of token_losses_kernel has a column per token");

/// Sum of one value per thread, as a tree; in thread 0.
__device__ double sum_of_block(double value) {
  __shared__ double sums[kThreads];
  __syncthreads();  // the last call's result has been read
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}
/// Σ value(i) of one block.
template <class F>
__device__ double sum_in_block(int64_t count, F value) {
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += value(i);
  return sum_of_block(sum);
}

/// Sum of one value per lane, as a tree; in lane 0.
__device__ double sum_of_warp(double value) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) value += __shfl_down_sync(0xffffffffu, value, half);
  return value;
}

__global__ void __launch_bounds__(kThreads) fill_ones_kernel(Vector<float> x) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < x.size) x[i] = 1;
}

__global__ void set_divisor_kernel(double value, double* divisor) {
  *divisor = value;
}

__global__ void __launch_bounds__(kThreads) count_divisor_kernel(TokenLoss token_loss, double* divisor) {
  const double sum =
      sum_in_block(token_loss.tokens(), [&](int64_t i) { return token_loss.counts(i) ? token_loss.weight(i) : 0; });
  if (threadIdx.x == 0) *divisor = sum;
}

__device__ void store_derivatives(const TokenLoss& token_loss, const Chunk<bf16>& chunk, int64_t i, double log_sum_exp,
                                  const Vector<const float>& d_loss, double divisor) {
  const auto d = token_loss.derivatives(chunk.first + i, log_sum_exp, d_loss, divisor);
  chunk.d_log_sum_exp[i] = d.log_sum_exp;
  chunk.d_label_logit[i] = d.label_logit;
  chunk.d_logit_sum[i] = d.logit_sum;
}

__global__ void __launch_bounds__(kColumns* kParts)
    token_losses_kernel(const __grid_constant__ TokenLoss token_loss, const __grid_constant__ Chunk<bf16> chunk,
                        const __grid_constant__ TokenLosses tokens, LossSums* sums, Vector<const float> d_loss,
                        const double* divisor) {
  const Part part(chunk.states.rows, chunk.count);
  const auto total = [&](const Matrix<float>& partial) {
    return sum_slots(part, [&](int64_t slot) { return static_cast<double>(partial(slot, part.column)); });
  };
  const auto rounded_lse = static_cast<float>(log_sum_exp_of_slots(part, chunk.states));
  const double label_logit = total(chunk.partial);
  const double logit_sum = token_loss.takes_logit_sum() ? total(chunk.logit_partial) : 0;
  if (threadIdx.y > 0) return;

  TokenLoss::Loss loss;
  if (part.stores(chunk.count)) {
    const int64_t i = part.column, token = chunk.first + i;
    const auto log_sum_exp = static_cast<double>(rounded_lse);
    loss = token_loss.loss(token, log_sum_exp, label_logit, logit_sum);
    chunk.log_sum_exp[i] = rounded_lse;
    if (tokens.loss.size > 0) tokens.loss[token] = static_cast<float>(loss.all);
    if (tokens.z_loss.size > 0) tokens.z_loss[token] = static_cast<float>(loss.z);
    if (tokens.log_sum_exp.size > 0) tokens.log_sum_exp[token] = rounded_lse;
    if (d_loss.size > 0) store_derivatives(token_loss, chunk, i, log_sum_exp, d_loss, *divisor);
  }
  const double all = sum_of_warp(loss.all), z = sum_of_warp(loss.z);
  if (threadIdx.x == 0) sums[chunk.first / kLossTokens + blockIdx.x] = {all, z};
}

__global__ void __launch_bounds__(kThreads)
    token_derivatives_kernel(const __grid_constant__ TokenLoss token_loss, const __grid_constant__ Chunk<bf16> chunk,
                             Vector<const float> log_sum_exp, Vector<const float> d_loss, const double* divisor) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < chunk.count) store_derivatives(token_loss, chunk, i, static_cast<double>(log_sum_exp[i]), d_loss, *divisor);
}

__global__ void __launch_bounds__(kThreads)
    sum_losses_kernel(const LossSums* sums, int64_t count, const double* divisor, LossValue* value) {
  const double all = sum_in_block(count, [&](int64_t i) { return sums[i].all; });
  const double z = sum_in_block(count, [&](int64_t i) { return sums[i].z; });
  if (threadIdx.x > 0) return;
  value->sum = all;
  value->z_sum = z;
  value->divisor = *divisor;
}

}  // namespace

void fill_ones(const Gpu& gpu, Vector<float> x) {
  if (x.size == 0) return;
  launch(gpu, "fill_ones", fill_ones_kernel, dim3(static_cast<unsigned>(ceil_div(x.size, kThreads))), dim3(kThreads),
         x);
}

void loss_divisor(const Gpu& gpu, const TokenLoss& token_loss, const CrossEntropyOptions& options, double* divisor) {
  if (options.reduction == Reduction::mean && !options.divisor)
    launch(gpu, "the divisor of a loss", count_divisor_kernel, dim3(1), dim3(kThreads), token_loss, divisor);
  else
    launch(gpu, "the divisor of a loss", set_divisor_kernel, dim3(1), dim3(1), options.divisor.value_or(1), divisor);
}

void token_losses(const Gpu& gpu, const TokenLoss& token_loss, const Chunk<bf16>& chunk, const TokenLosses& tokens,
                  LossSums* sums, Vector<const float> d_loss, const double* divisor) {
  launch(gpu, "the losses of tokens", token_losses_kernel, dim3(static_cast<unsigned>(ceil_div(chunk.count, kColumns))),
         dim3(kColumns, kParts), token_loss, chunk, tokens, sums, d_loss, divisor);
}

void token_derivatives(const Gpu& gpu, const TokenLoss& token_loss, const Chunk<bf16>& chunk,
                       Vector<const float> log_sum_exp, Vector<const float> d_loss, const double* divisor) {
  launch(gpu, "the derivatives of losses", token_derivatives_kernel,
         dim3(static_cast<unsigned>(ceil_div(chunk.count, kThreads))), dim3(kThreads), token_loss, chunk, log_sum_exp,
         d_loss, divisor);
}

void sum_losses(const Gpu& gpu, const LossSums* sums, int64_t tokens, const double* divisor, LossValue* value) {
  launch(gpu, "the sum of losses", sum_losses_kernel, dim3(1), dim3(kThreads), sums, ceil_div(tokens, kLossTokens),
         divisor, value);
}

}  // namespace coda::hopper
