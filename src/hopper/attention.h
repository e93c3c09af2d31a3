// Causal attention on a GPU, by cuDNN; src/llama/attention.h says what it computes.
#pragma once
#include <memory>
#include <span>

#include "attention_batch.h"
#include "coda/gpu.h"

namespace coda::hopper {

/// Plans for one kind of batch, made once: that allocates, waits, and takes seconds. Running them does neither, can be captured in a
/// CUDA graph, and gives the same bits every time.
class Attention {
 public:
  /// With backward, forward() keeps what the backward pass needs. Throws OperandError for a shape or a batch that makes no sense, and
  /// DeviceError if cuDNN is missing, too old, or refuses.
  Attention(const Gpu& gpu, const llama::AttentionShape& shape, const AttentionBatch& batch, bool backward);
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;

  /// Bytes of gpu's workspace that forward() and backward() need.
  int64_t workspace_bytes() const;

  /// The documents of the calls that are enqueued, or replayed, from now on; [starts[i], starts[i + 1]) are document i's tokens, as
  /// on the CPU. For ragged batches only. Not to be captured.
  void set_documents(const Gpu& gpu, std::span<const int64_t> starts);

  // Matrices are contiguous, at addresses that are multiples of 16 bytes. Outputs may not overlap inputs. Both throw OperandError
  // before anything is written, also for a workspace that is too small.

  /// log_sum_exp: heads·M floats in an order of cuDNN's, for backward(); null exactly where the plans have no backward pass.
  void forward(const Gpu& gpu,
               Matrix<const bf16> qkv,  // [M, (heads + 2 kv_heads)·dh], columns q | k | v
               Matrix<bf16> out,        // [M, heads·dh]
               float* log_sum_exp);
  void backward(const Gpu& gpu,
                Matrix<const bf16> qkv,    // [M, (heads + 2 kv_heads)·dh]
                Matrix<const bf16> out,    // [M, heads·dh]
                Matrix<const bf16> d_out,  // [M, heads·dh]
                const float* log_sum_exp,
                Matrix<bf16> d_qkv);  // [M, (heads + 2 kv_heads)·dh]

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

}  // namespace coda::hopper
