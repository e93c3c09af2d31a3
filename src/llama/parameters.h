// The parameters of a Llama: fp32 masters, their gradients and AdamW's moments, and the weights that the products read.
//
// Masters live in packed order (coda/interleave.h). A matrix behind a norm is read folded, W̃ = W ⊙ gamma by columns, and its
// product leaves the gradient of W̃; update() turns it into those of W and gamma first, so that the norm, clipping and
// checkpoints see dW and d_gamma.
#pragma once
#include <string>
#include <vector>

#include "buffer.h"
#include "coda/cpu.h"
#include "model.h"

namespace coda::llama {

struct Parameter {
  std::string name;    // "layers.0.qkv"
  int64_t rows, cols;  // a vector has one row
  bool decays;         // matrices do
  int gamma = -1;      // index of the norm weight folded into the columns, or -1
  Buffer<float> master;
  Buffer<float> gradient;  // of the folded weight until update() unfolds it
  Buffer<float> moment1, moment2;
  // A tied embedding is read twice: as it is by the lookup (gradient), and folded by the vocabulary product (this).
  Buffer<float> folded_gradient;
  bool unfolded_lookup = false;
};

/// A tensor of a checkpoint, as rows of a parameter.
struct TensorRows {
  enum class Order { plain, rotary, first, second };
  TensorInfo info;
  int parameter;
  int64_t first_row;  // in the parameter's own order, before packing
  int64_t rows;
  Order order;
};

class Parameters {
 public:
  explicit Parameters(const Config& config);

  static constexpr int kEmbedding = 0;
  int qkv(int64_t layer) const { return layer_base(layer); }
  int o(int64_t layer) const { return layer_base(layer) + 1; }
  int gate_up(int64_t layer) const { return layer_base(layer) + 2; }
  int down(int64_t layer) const { return layer_base(layer) + 3; }
  int norm_attention(int64_t layer) const { return layer_base(layer) + 4; }
  int norm_mlp(int64_t layer) const { return layer_base(layer) + 5; }
  int norm_final() const { return layer_base(config_.layers); }
  /// The embedding itself where they are tied.
  int lm_head() const { return config_.tied ? kEmbedding : norm_final() + 1; }

  Parameter& operator[](int index) { return all_[static_cast<size_t>(index)]; }
  const Parameter& operator[](int index) const { return all_[static_cast<size_t>(index)]; }
  std::vector<Parameter>& all() { return all_; }

  /// In Hugging Face's order.
  const std::vector<TensorRows>& tensors() const { return tensors_; }
  /// Throws UsageError for a name that is not there, OperandError for a wrong size.
  void set(const std::string& name, std::span<const float> value);
  void get(const std::string& name, Buffer<float> Parameter::*buffer, std::span<float> value) const;

  void initialize(uint64_t seed);

 private:
  static constexpr int kPerLayer = 6;
  int layer_base(int64_t layer) const { return 1 + static_cast<int>(layer) * kPerLayer; }
  const TensorRows& find(const std::string& name, size_t size) const;
  /// The parameter's row that holds row i of the tensor.
  int64_t stored_row(const TensorRows& tensor, int64_t i) const;

  Config config_;
  std::vector<Parameter> all_;
  std::vector<TensorRows> tensors_;
};

/// The matrices in the type and form that products read: folded, packed, rounded once from the masters. In float an
/// unfolded matrix is its master.
template <class E>
class Weights {
 public:
  explicit Weights(Parameters& parameters);
  Matrix<const E> matrix(int parameter) const { return views_[static_cast<size_t>(parameter)]; }
  /// Writes rows [first, first + count) of a matrix from its master.
  void write_rows(Parameters& parameters, int parameter, int64_t first, int64_t count);
  void write_all(Cpu& cpu, Parameters& parameters);

 private:
  std::vector<Buffer<E>> copies_;
  std::vector<Matrix<const E>> views_;
};

/// One AdamW step on all parameters and their weights. Returns the norm of the gradients before clipping; if it is not
/// finite nothing changes. t counts from 1.
template <class E>
double adamw_update(Cpu& cpu, Parameters& parameters, Weights<E>& weights, const AdamW& options, int64_t t);

}  // namespace coda::llama
