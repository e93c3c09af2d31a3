// The loss of a linear head over a vocabulary, forward and backward, a chunk of tokens at a time: logits of all tokens never
// exist together.
//
//      product      program                                                     stores
//  F5  h W̃lmᵀ       l = f(r⊙acc); log-sum-exp, label's logit, sum of a row       partials; the chunk's relative logits
//      per token    loss = lse − (1−ε)·l[label] − (ε/V)·Σ l + m·lse², weighted
//  B5  elementwise  dl from the loss's derivatives by the row's statistics       r·dl, in place
//      dl' W̃lm      d_h = acc − r²·s·h                                           d_h
//  W   dl'ᵀ h                                                                    gradient of the (folded) weight, in float
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "coda/cpu.h"
#include "coda/tensor.h"

namespace coda {

class Gpu;

/// The label of a token that does not count, unless the options name another.
inline constexpr int32_t kIgnoreIndex = -100;

/// none: every token's loss is a result of its own, with an upstream gradient of its own. sum: Σ over the tokens that count.
/// mean: that sum over the sum of their weights; NaN where that is 0, as in PyTorch, with gradients of zero.
enum class Reduction { none, sum, mean };

struct CrossEntropyOptions {
  Reduction reduction = Reduction::mean;
  /// What mean divides by in place of its own tokens: with that of a whole step micro-batches add up, and are no mean of means.
  std::optional<double> divisor;
  int32_t ignore_index = kIgnoreIndex;
  /// ε in [0, 1]: the share of the target's mass that is spread evenly over all V classes.
  double label_smoothing = 0;
  /// m >= 0: m·lse² is added to each token's loss.
  double z_loss = 0;
  /// c > 0: the logits are c·tanh(l/c).
  std::optional<double> softcap;
};

/// What the loss is of. E: float or bf16.
template <class E>
struct LinearHead {
  Matrix<const E> h;            // [M, K]
  Vector<const float> inv_rms;  // [M]  r of the RMSNorm in front, its gamma folded into weight; empty: there is none
  Matrix<const E> weight;       // [V, K]
  Vector<const int32_t> label;  // [M]  in [0, V), or ignore_index
  Vector<const float> token_weight;  // [M]  times each token's loss; empty: 1
};

/// Per token, written where not empty; 0 for one that does not count (its log-sum-exp is written too).
struct TokenLosses {
  Vector<float> loss;         // [M]
  Vector<float> z_loss;       // [M]  the part of it that is m·lse²
  Vector<float> log_sum_exp;  // [M]  what backward() takes
};

struct LossValue {
  double sum = 0;      // of all tokens that count, each times its weight
  double z_sum = 0;    // the part of it that is z-loss
  double divisor = 1;  // 1, or what mean divides by
  double value() const { return sum / divisor; }
  double z_value() const { return z_sum / divisor; }
};

template <class E>
struct LinearHeadGradients {
  Matrix<E> d_h;           // [M, K]  through the norm in front, if there is one
  Matrix<float> d_weight;  // [V, K]  of the folded weight
  bool add = false;        // to what d_weight holds
};

/// Holds nothing but memory for one chunk, which grows to what the calls need. One call at a time.
/// Every call throws OperandError for shapes that do not fit, a label that is neither in [0, V) nor ignore_index (it names the
/// row and the value), OverlapError for a gradient that shares memory with an input, and UsageError for options that make no
/// sense, before anything is written. Inputs are not changed; a call that is repeated gives the same bits.
template <class E>
class LinearCrossEntropy {
 public:
  LinearCrossEntropy();
  ~LinearCrossEntropy();
  LinearCrossEntropy(LinearCrossEntropy&&) noexcept;
  LinearCrossEntropy& operator=(LinearCrossEntropy&&) noexcept;

  /// One product.
  LossValue forward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                    const TokenLosses& tokens = {});

  /// From forward's log_sum_exp [M] and the upstream gradient d_loss: [M] for the reduction none, one value for the others.
  /// Makes the logits again: three products.
  void backward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                Vector<const float> log_sum_exp, Vector<const float> d_loss, const LinearHeadGradients<E>& gradients);

  /// Both, where the upstream gradient is known beforehand: three products in all. A chunk's logits are kept in E.
  LossValue forward_backward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                             Vector<const float> d_loss, const LinearHeadGradients<E>& gradients,
                             const TokenLosses& tokens = {});

  /// Tokens of a chunk: as many as keep its logits near 64 MB, at least 16.
  static int64_t chunk_tokens(int64_t vocab, int64_t tokens);

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

/// What a GpuLinearCrossEntropy is made for.
struct GpuLossSize {
  int64_t tokens;            // of a call, at most
  int64_t vocab;             // V
  bool gradients = true;     // false: forward() only, which keeps no logits
  int64_t chunk_tokens = 0;  // of a chunk; 0: GpuLinearCrossEntropy::chunk_tokens
};

/// The same on a GPU, for bf16. Every pointer is to memory of the device, and all memory but the workspace that unaligned operands
/// need (docs/gpu.md) is its own, or handed to it, from the beginning: no call allocates or waits, and all can be captured in a CUDA graph. One call at
/// a time, on streams that follow each other.
///
/// Sums are of doubles in an order that depends on the number of tokens only. Labels, token weights and d_loss are read when the work
/// runs, so that a captured graph can be replayed with others; with another divisor, too, as d_loss = 1/divisor of the reduction sum.
/// A label that is neither in [0, V) nor ignore_index cannot be refused then: the loss of its token is NaN, and with it the sum and the
/// gradients. Errors otherwise as on the CPU, and OperandError for more tokens or another vocabulary than it was made for.
class GpuLinearCrossEntropy {
 public:
  /// Takes memory_bytes(size) of gpu's device. Throws DeviceError where there are not as many.
  GpuLinearCrossEntropy(const Gpu& gpu, const GpuLossSize& size);
  /// Over memory_bytes(size) of the caller's, 256-byte aligned, which stay until the work is done. Waits for nothing; the memory is
  /// prepared on gpu's stream.
  GpuLinearCrossEntropy(const Gpu& gpu, const GpuLossSize& size, void* memory);
  ~GpuLinearCrossEntropy();
  GpuLinearCrossEntropy(GpuLinearCrossEntropy&&) noexcept;
  GpuLinearCrossEntropy& operator=(GpuLinearCrossEntropy&&) noexcept;

  static int64_t memory_bytes(const GpuLossSize& size);
  /// Tokens of a chunk: at most 4096 (docs/measurements.md), a multiple of 128, chunks of nearly equal size.
  static int64_t chunk_tokens(int64_t tokens);

  /// Bytes of gpu's workspace that forward() needs, or with gradients backward() and forward_backward(): 0 where everything is aligned
  /// and V is a multiple of 8.
  int64_t workspace(const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                    const LinearHeadGradients<bf16>& gradients = {}) const;

  /// *value is on the device. It is written last.
  void forward(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options, LossValue* value,
               const TokenLosses& tokens = {});
  void backward(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                Vector<const float> log_sum_exp, Vector<const float> d_loss,
                const LinearHeadGradients<bf16>& gradients);
  void forward_backward(const Gpu& gpu, const LinearHead<bf16>& head, const CrossEntropyOptions& options,
                        Vector<const float> d_loss, const LinearHeadGradients<bf16>& gradients, LossValue* value,
                        const TokenLosses& tokens = {});

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace coda
