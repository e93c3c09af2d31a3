// A Llama layer, and the vocabulary loss behind it, as a list of kernels: the tables of src/llama/layer.h and coda/loss.h row by
// row, with what each moves, and what the same layer moves as separate kernels.
//
// Two layers that fuse nothing into their products stand beside ours, both of the same arithmetic:
//   separate   one kernel per operator: GEMM, residual add, RMSNorm, SwiGLU, RoPE, cross-entropy, and their derivatives;
//   compiled   everything between two products as one kernel, as torch.compile makes it: add + RMSNorm, and in the backward
//              pass RMSNorm's derivative + add.
// Attention is the same kernel in all three, and so are the weight gradients, which are stored in float. The optimizer is in
// none (ours reads d_W ⊙ γ and d_γ off the folded gradients in its first pass, which reads them anyway).
#pragma once
#include <optional>

#include "explain/cost.h"
#include "explain/machine.h"

namespace coda::explain {

struct Block {
  int64_t tokens = 0;            // M
  int64_t hidden = 0;            // D
  int64_t ffn = 0;               // F
  int64_t heads = 0;             // 0: hidden / head_dim
  int64_t kv_heads = 0;          // 0: a quarter of heads, or as many
  int64_t head_dim = 0;          // 0: hidden / heads where those are given, otherwise 128
  std::optional<int64_t> vocab;  // V; none: no loss
  int64_t seq = 0;               // tokens of a document, for attention; 0: 4096, or all
  int64_t chunk = 0;             // tokens whose logits exist at a time; 0: as many as the library takes (64 MB)
  ElementType element = ElementType::bfloat16;

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
  int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
  /// Weights of the layer's products, and of the vocabulary's if there is one.
  int64_t product_weights() const;
};

/// With every default filled in. Throws UsageError naming the flag, what it is and what it needs.
Block completed(Block block);

enum class Step { product, elementwise, finish, attention };

/// How the factors of a product are stored: a [M, K] and b [N, K] (TN), b as [K, N] (NN), both so (NT).
enum class Form { tn, nn, nt };

struct Row {
  std::string name;  // F1, "finish r_mid", "W down"; one of a kind
  bool backward;
  bool loss;  // of the vocabulary, not of the layer
  Step step;
  std::string what;        // "a·Woᵀ"
  Form form;               // of a product
  Sizes sizes;             // of products and elementwise passes
  const Program* program;  // of the same
  std::string formula;
  Kernel fused;
  std::vector<Kernel> separate, compiled;
  std::vector<Tensor> kept;           // for the backward pass
  std::vector<Tensor> kept_separate;  // the same where nothing is fused
};

/// All rows in the order in which they run. block is completed.
std::vector<Row> rows(const Block& block);

struct Sum {
  int64_t flops = 0, read = 0, written = 0;
  double seconds = 0;  // 0 without a machine

  int64_t bytes() const { return read + written; }
};

struct Totals {
  Sum fused, separate, compiled;
  int64_t kept = 0, kept_separate = 0;  // bytes
};

/// Rows that are added up: the layer's without attention, attention, the loss, everything. What attention keeps is the layer's.
enum class Part { layer_forward, layer_backward, layer, attention, loss, all };
Totals total(const std::vector<Row>& rows, Part part, const std::optional<Machine>& machine);

}  // namespace coda::explain
