// The parameters of a Llama: fp32 masters, their gradients and AdamW's moments, and the weights that the products read.
//
// Masters live in packed order (coda/interleave.h). A matrix behind a norm is read folded, W̃ = W ⊙ gamma by columns, and its
// product leaves the gradient of W̃; update() turns it into those of W and gamma first, so that the norm, clipping and
// checkpoints see dW and d_gamma.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coda/cpu.h"
#include "layer.h"
#include "model.h"
#include "optimizer_rows.h"

namespace coda::llama {

/// What a parameter is, wherever its values lie.
struct Parameter {
  std::string name;    // "layers.0.qkv"
  int64_t rows, cols;  // a vector has one row
  bool decays;         // matrices do
  int gamma = -1;      // index of the norm weight folded into the columns, or -1
  // A tied embedding: read as it is by the lookup, and folded by the vocabulary product.
  bool read_twice = false;
  int64_t size() const { return rows * cols; }
};

/// The fp32 values that a parameter has.
enum class Values { master, gradient, moment1, moment2 };

/// Memory of one parameter's values.
template <class Engine>
struct ParameterMemory {
  explicit ParameterMemory(const Parameter& p)
      : master(p.rows, p.cols),
        gradient(p.rows, p.cols),
        moment1(p.rows, p.cols),
        moment2(p.rows, p.cols),
        folded_gradient(p.read_twice ? p.rows : 0, p.cols) {}

  BufferOn<Engine, float>& operator[](Values which) {
    switch (which) {
      case Values::gradient:
        return gradient;
      case Values::moment1:
        return moment1;
      case Values::moment2:
        return moment2;
      case Values::master:
        break;
    }
    return master;
  }

  BufferOn<Engine, float> master;
  BufferOn<Engine, float> gradient;  // of the folded weight until update() unfolds it
  BufferOn<Engine, float> moment1, moment2;
  BufferOn<Engine, float> folded_gradient;  // of one that is read twice: of the vocabulary product alone
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

  const Parameter& operator[](int index) const { return all_[static_cast<size_t>(index)]; }
  const std::vector<Parameter>& all() const { return all_; }
  /// A weight that products read in a form of its own: folded, or rounded.
  bool is_multiplied(int index) const {
    return (*this)[index].decays && (index != kEmbedding || (*this)[index].read_twice);
  }

  /// In Hugging Face's order.
  const std::vector<TensorRows>& tensors() const { return tensors_; }
  /// Throws UsageError for a name that is not there, OperandError for a size that is not the tensor's.
  const TensorRows& find(const std::string& name, size_t size) const;
  /// Between a tensor in Hugging Face's layout and its parameter's values.
  void pack(const TensorRows& tensor, std::span<const float> value, Matrix<float> parameter) const;
  void unpack(const TensorRows& tensor, Matrix<const float> parameter, std::span<float> value) const;

  /// A fresh master: normal of standard deviation 0.02 (matrices), 1 (norms); a pure function of seed and index.
  void initialize(int index, uint64_t seed, std::span<float> master) const;

 private:
  static constexpr int kPerLayer = 6;
  int layer_base(int64_t layer) const { return 1 + static_cast<int>(layer) * kPerLayer; }
  /// The parameter's row that holds row i of the tensor.
  int64_t stored_row(const TensorRows& tensor, int64_t i) const;

  Config config_;
  std::vector<Parameter> all_;
  std::vector<TensorRows> tensors_;
};

/// The numbers of AdamW's step t, counted from 1, for matrices: gradient_scale is clipping's, and left at 1.
AdamWStep adamw_step(const AdamW& options, int64_t t);

}  // namespace coda::llama
