// The products of a Llama block, forward and backward, each with its program, the library's plain product of the same shape, and
// that product followed by the program as one pass over its stored result.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coda/cpu.h"
#include "library.h"
#include "llama/model.h"

namespace coda::bench {

struct Shape {
  int64_t tokens = 1024, hidden = 512, ffn = 1408, heads = 8, kv_heads = 8, vocab = 0;  // vocab 0: no loss
};

struct Row {
  std::string name;     // "F2 gate, up"
  std::string program;  // "RmsNormSwiGlu"
  Form form;
  int64_t m, n, k;
  bool backward;
  bool in_block;                        // not the loss
  std::function<void()> fused;          // the product with its program
  std::function<void(Library&)> plain;  // the library's product alone; null without a product
  std::function<void()> pass;           // the program over the stored product; null where a library needs none

  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
};

/// Rows over one set of tensors, which lives as long as this does. E is float or bf16; a library's products are fp32
/// always, since OpenBLAS has no other on these CPUs, of the same values.
class Block {
 public:
  virtual ~Block() = default;
  const std::vector<Row>& rows() const { return rows_; }
  /// Between the outputs of row.fused and of row.plain(library) with row.pass: the largest difference over the largest value. Rows
  /// with a product only.
  virtual double difference(const Row& row, Library& library) = 0;

 protected:
  std::vector<Row> rows_;
};
std::unique_ptr<Block> make_block(Cpu& cpu, const Shape& shape, llama::Dtype dtype);

}  // namespace coda::bench
