// Causal attention on a GPU, by cuDNN; src/llama/attention.h says what it computes.
#pragma once
#include <memory>
#include <span>

#include "coda/gpu.h"
#include "llama/attention.h"

namespace coda::hopper {

/// The batches that a plan is made for.
struct AttentionBatch {
  int64_t tokens = 0;     // M, exactly
  int64_t documents = 0;  // one after the other: as many, or, where ragged, up to as many
  int64_t length = 0;     // of each of them, or, where ragged, of the longest
  bool ragged = false;    // of any lengths, which set_documents() says
  /// cuDNN's deterministic backward pass keeps the scores' gradients, 2 bytes · heads · length² a document with length rounded up
  /// to 64: so many documents, or heads of a document, go together as stay within this. Less is slower.
  int64_t score_bytes = int64_t{4} << 30;
};

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
