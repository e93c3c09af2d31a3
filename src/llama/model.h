// A Llama with its gradients and its optimizer's state: what the trainer, eval and sample work on.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coda/cpu.h"
#include "config.h"

namespace coda::llama {

enum class Dtype { fp32, bf16 };  // of weights and activations; masters, gradients and statistics are fp32

/// Tokens of one forward pass, documents packed one after the other. Attention stays inside a document and positions count
/// from 0 in each.
struct Batch {
  std::span<const int32_t> tokens;           // [M]
  std::span<const int32_t> targets;          // [M]  the token that follows; ignored where it is -100
  std::span<const int64_t> document_starts;  // [documents + 1]  0, …, M
};

struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // matrices only
  double clip = 1.0;          // L2 norm of all gradients; 0 does not clip
};

/// A tensor as Hugging Face's checkpoints name and lay it out.
struct TensorInfo {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [out, in], or [size]
  int64_t size() const;
};

/// A tensor of the optimizer's file; the layout is coda's own.
struct StateTensor {
  std::string name;  // "master/…", "moment1/…", "moment2/…"
  int64_t size;
};

class Model {
 public:
  /// Throws UsageError for a config that check() refuses, or whose parameters this machine's memory cannot hold. The weights are NaN until initialize() or set_tensor().
  Model(Cpu& cpu, const Config& config, Dtype dtype);
  ~Model();

  const Config& config() const;
  Dtype dtype() const;

  /// Fresh weights, a pure function of seed: normal of standard deviation 0.02 (matrices), 1 (norms).
  void initialize(uint64_t seed);

  /// Sum of the cross-entropy over the targets that count. Throws OperandError naming the row and the value of a token
  /// or target outside the vocabulary.
  double loss(const Batch& batch);

  /// The same, and adds the gradient of sum / divisor to the gradients; the first call after an update starts them anew.
  /// For accumulation, divisor is the number of counted targets of all micro-batches together. divisor > 0.
  double forward_backward(const Batch& batch, double divisor);

  /// One AdamW step from the gradients; returns their norm before clipping. If the norm is not finite nothing changes.
  double update(const AdamW& options);
  /// Updates done so far: AdamW's t is this plus one.
  int64_t updates() const;
  void set_updates(int64_t updates);

  /// Every parameter, in Hugging Face's order; lm_head.weight only when it is not tied.
  std::vector<TensorInfo> tensors() const;
  /// value in Hugging Face's layout. After the last one, call weights_changed().
  void set_tensor(const std::string& name, std::span<const float> value);
  void get_tensor(const std::string& name, std::span<float> value) const;
  /// The gradient of the last update(), before clipping, in the same layout.
  void get_gradient(const std::string& name, std::span<float> value) const;
  /// Makes the weights that the products read (folded, packed, rounded) from the masters. update() does it by itself.
  void weights_changed();

  /// Where the first weight is that is not finite, as "the weight model.norm.weight, row 0, column 5 (nan)".
  std::optional<std::string> find_not_finite_weight() const;
  /// The same of the weights, then of what a forward pass over the batch makes, in its order: "layer 2, gate_up, row 12,
  /// column 5 (inf)", with layers, rows (tokens) and columns from 0, gate_up, q and k in packed order (coda/interleave.h).
  /// Runs that pass again; gradients stay.
  std::optional<std::string> find_not_finite(const Batch& batch);
  /// The same of the gradients after an update(), in the order of the backward pass: "the gradient of model.norm.weight, …".
  std::optional<std::string> find_not_finite_gradient() const;

  /// Masters and moments, in a fixed order, to be saved and read back. After the last set_state(), call weights_changed().
  std::vector<StateTensor> optimizer_state() const;
  void get_state(const StateTensor& tensor, std::span<float> value) const;
  void set_state(const StateTensor& tensor, std::span<const float> value);

  struct Impl;
  /// A model of an engine of its own.
  explicit Model(std::unique_ptr<Impl> impl);

 private:
  friend class Decoder;
  std::unique_ptr<Impl> impl_;
};

/// Text generation with a cache of keys and values.
class Decoder {
 public:
  explicit Decoder(Model& model);
  ~Decoder();
  /// Appends tokens (at least one) to the context and returns the logits of the one that follows, [vocab]. Throws
  /// UsageError past max_positions.
  std::span<const float> feed(std::span<const int32_t> tokens);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace coda::llama
