// The vocabulary loss on a GPU: the chunks of loss/chunk.h, with kernels of token_losses.h between their products.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>

#include "call_check.h"
#include "coda/loss.h"
#include "device_guard.h"
#include "device_memory.h"
#include "loss/check.h"
#include "loss/chunk.h"
#include "loss/token_loss.h"
#include "loss_memory.h"
#include "plan.h"
#include "token_losses.h"

namespace coda {

using detail::Chunk;
using detail::ChunkMemory;
using detail::TokenLoss;

namespace hopper {

namespace {

/// In the place of a Gpu: every call is checked and starts nothing.
struct Rehearsal {
  int64_t workspace = 0;  // bytes that the largest of them needs
};
template <class A, class B, class P>
void gemm(Rehearsal& rehearsal, const A& a, const B& b, const P& program) {
  coda::detail::with_program(program, [&](const coda::detail::ProgramInfo& info) {
    coda::detail::check_product(coda::detail::factor(a), coda::detail::factor(b), info);
    rehearsal.workspace = std::max(rehearsal.workspace, gemm_workspace(a, b, program));
  });
}
template <class T, class P>
void map(Rehearsal& /*rehearsal*/, const Matrix<T>& x, const P& program) {
  coda::detail::with_program(
      program, [&](const coda::detail::ProgramInfo& info) { coda::detail::check_map(coda::detail::factor(x), info); });
}
void mean_dot(Rehearsal& /*rehearsal*/, const Matrix<float>& /*dot*/, int64_t /*width*/, Vector<float> /*out*/) {}

/// No product runs where there are no tokens.
template <class Body>
void for_chunks_with_tokens(const LinearHead<bf16>& head, const LossPieces& pieces, const Body& body) {
  if (head.h.rows > 0) coda::detail::for_chunks(head, pieces.chunk, body);
}
/// What no tokens leave of a weight's gradient.
void clear(const Gpu& gpu, const LinearHeadGradients<bf16>& gradients) {
  const Matrix<float>& x = gradients.d_weight;
  if (gradients.add || x.rows == 0 || x.cols == 0) return;
  const DeviceGuard current(gpu.device());
  check(cudaMemset2DAsync(x.data, static_cast<size_t>(x.stride) * sizeof(float), 0,
                          static_cast<size_t>(x.cols) * sizeof(float), static_cast<size_t>(x.rows), gpu.stream()),
        "cudaMemset2DAsync");
}

}  // namespace

}  // namespace hopper

struct GpuLinearCrossEntropy::Memory {
  GpuLossSize size;
  int device;
  hopper::DeviceMemory memory;  // unless the caller's is used
  hopper::Pieces whole;
  hopper::LossPieces pieces;

  Memory(const Gpu& gpu, const GpuLossSize& size_)
      : size(size_), device(gpu.device()), memory(memory_bytes(size)), whole(memory.data()), pieces(whole, size) {
    hopper::fill_ones(gpu, {pieces.ones, size.chunk_tokens});
    hopper::synchronize();  // other streams may use it next
  }
  Memory(const Gpu& gpu, const GpuLossSize& size_, void* of_caller)
      : size(size_), device(gpu.device()), whole(static_cast<std::byte*>(of_caller)), pieces(whole, size) {
    if (of_caller == nullptr || reinterpret_cast<uintptr_t>(of_caller) % 256 != 0)
      throw OperandError("memory", fmt::format("at address {}", of_caller), "an address that is a multiple of 256");
    hopper::fill_ones(gpu, {pieces.ones, size.chunk_tokens});
  }

  void check_call(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options) const {
    detail::check_head(head, options);
    if (head.h.rows > size.tokens)
      throw OperandError("h", fmt::format("{} tokens", head.h.rows),
                         fmt::format("at most the {} that the loss was made for", size.tokens));
    if (head.weight.rows != size.vocab)
      throw OperandError("weight", fmt::format("of a vocabulary of {}", head.weight.rows),
                         fmt::format("the {} that the loss was made for", size.vocab));
    if (gpu.device() != device)
      throw DeviceError(fmt::format("the loss was made on GPU {} and is called on GPU {}", device, gpu.device()));
  }
  void check_call(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                  Vector<const float> d_loss, const LinearHeadGradients<bf16>& gradients) const {
    check_call(gpu, head, options);
    if (!size.gradients) throw UsageError("the loss was made without gradients, and is asked for some");
    detail::check_gradients(head, options, d_loss, gradients);
  }
  static void check_value(const LossValue* value) {
    if (value == nullptr) throw OperandError("value", "null", "memory of the device for a LossValue");
  }

  /// Of the first chunk, which is the largest.
  template <class Keep>
  void rehearse(hopper::Rehearsal& rehearsal, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                const LinearHeadGradients<bf16>* gradients) const {
    const Chunk<bf16> chunk(head, 0, pieces.chunk);
    if (Keep::value || gradients == nullptr) detail::chunk_statistics<Keep>(rehearsal, chunk, options);
    if (gradients != nullptr) detail::chunk_gradients<Keep>(rehearsal, chunk, options, chunk.log_sum_exp, *gradients);
  }
  template <class Keep>
  void check_products(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                      const LinearHeadGradients<bf16>* gradients) const {
    if (head.h.rows == 0) return;
    hopper::Rehearsal rehearsal;
    rehearse<Keep>(rehearsal, head, options, gradients);
    if (gpu.workspace_bytes() < rehearsal.workspace)
      throw OperandError("workspace", fmt::format("{} bytes", gpu.workspace_bytes()),
                         fmt::format("{} bytes (GpuLinearCrossEntropy::workspace)", rehearsal.workspace));
  }
};

GpuLinearCrossEntropy::GpuLinearCrossEntropy(const Gpu& gpu, const GpuLossSize& size) {
  const hopper::DeviceGuard current(gpu.device());
  memory_ = std::make_unique<Memory>(gpu, hopper::checked(size));
}
GpuLinearCrossEntropy::GpuLinearCrossEntropy(const Gpu& gpu, const GpuLossSize& size, void* memory)
    : memory_(std::make_unique<Memory>(gpu, hopper::checked(size), memory)) {}
GpuLinearCrossEntropy::~GpuLinearCrossEntropy() = default;
GpuLinearCrossEntropy::GpuLinearCrossEntropy(GpuLinearCrossEntropy&&) noexcept = default;
GpuLinearCrossEntropy& GpuLinearCrossEntropy::operator=(GpuLinearCrossEntropy&&) noexcept = default;

int64_t GpuLinearCrossEntropy::workspace(const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                                         const LinearHeadGradients<bf16>& gradients) const {
  detail::check_head(head, options);
  if (head.h.rows == 0) return 0;
  hopper::Rehearsal rehearsal;
  if (gradients.d_h.data == nullptr) {
    memory_->rehearse<RecomputeLogits>(rehearsal, head, options, nullptr);
  } else {
    memory_->rehearse<KeepLogits>(rehearsal, head, options, &gradients);
    memory_->rehearse<RecomputeLogits>(rehearsal, head, options, &gradients);
  }
  return rehearsal.workspace;
}

void GpuLinearCrossEntropy::forward(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                                    LossValue* value, const TokenLosses& tokens) {
  memory_->check_call(gpu, head, options);
  detail::check_tokens(tokens, head.h.rows);
  Memory::check_value(value);
  memory_->check_products<RecomputeLogits>(gpu, head, options, nullptr);
  const TokenLoss token_loss(head, options);
  const hopper::LossPieces& own = memory_->pieces;
  hopper::loss_divisor(gpu, token_loss, options, own.divisor);
  hopper::for_chunks_with_tokens(head, own, [&](const Chunk<bf16>& chunk) {
    detail::chunk_statistics<RecomputeLogits>(gpu, chunk, options);
    hopper::token_losses(gpu, token_loss, chunk, tokens, own.sums, {}, own.divisor);
  });
  hopper::sum_losses(gpu, own.sums, head.h.rows, own.divisor, value);
}

void GpuLinearCrossEntropy::backward(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                                     Vector<const float> log_sum_exp, Vector<const float> d_loss,
                                     const LinearHeadGradients<bf16>& gradients) {
  memory_->check_call(gpu, head, options, d_loss, gradients);
  detail::check_log_sum_exp(log_sum_exp, head.h.rows);
  memory_->check_products<RecomputeLogits>(gpu, head, options, &gradients);
  const TokenLoss token_loss(head, options);
  const hopper::LossPieces& own = memory_->pieces;
  hopper::loss_divisor(gpu, token_loss, options, own.divisor);
  if (head.h.rows == 0) hopper::clear(gpu, gradients);
  hopper::for_chunks_with_tokens(head, own, [&](const Chunk<bf16>& chunk) {
    const Vector<const float> chunk_lse(log_sum_exp.data + chunk.first, chunk.count);
    hopper::token_derivatives(gpu, token_loss, chunk, chunk_lse, d_loss, own.divisor);
    detail::chunk_gradients<RecomputeLogits>(gpu, chunk, options, chunk_lse, gradients);
  });
}

void GpuLinearCrossEntropy::forward_backward(const Gpu& gpu, const LinearHead<bf16>& head,
                                             const CrossEntropyOptions& options, Vector<const float> d_loss,
                                             const LinearHeadGradients<bf16>& gradients, LossValue* value,
                                             const TokenLosses& tokens) {
  memory_->check_call(gpu, head, options, d_loss, gradients);
  detail::check_tokens(tokens, head.h.rows);
  Memory::check_value(value);
  memory_->check_products<KeepLogits>(gpu, head, options, &gradients);
  const TokenLoss token_loss(head, options);
  const hopper::LossPieces& own = memory_->pieces;
  hopper::loss_divisor(gpu, token_loss, options, own.divisor);
  if (head.h.rows == 0) hopper::clear(gpu, gradients);
  hopper::for_chunks_with_tokens(head, own, [&](const Chunk<bf16>& chunk) {
    detail::chunk_statistics<KeepLogits>(gpu, chunk, options);
    hopper::token_losses(gpu, token_loss, chunk, tokens, own.sums, d_loss, own.divisor);
    detail::chunk_gradients<KeepLogits>(gpu, chunk, options, chunk.log_sum_exp, gradients);
  });
  hopper::sum_losses(gpu, own.sums, head.h.rows, own.divisor, value);
}

}  // namespace coda
