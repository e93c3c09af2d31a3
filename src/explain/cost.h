// What a program costs: the FLOPs of its product, and the bytes that it moves, fused and as a pass of its own.
//
// A tensor counts once for each kernel that reads it and once for each that writes it. What a product reads again because its
// factors do not stay in cache is counted nowhere, nor are the few FLOPs of programs and passes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "explain/programs.h"

namespace coda::explain {

/// One kernel that runs from memory to memory.
struct Kernel {
  std::string name;
  int64_t flops = 0;    // of products: 2·M·N·K
  int64_t read = 0;     // bytes
  int64_t written = 0;  // bytes

  int64_t bytes() const { return read + written; }
};

/// A tensor in memory. A vector is a tensor of one row.
struct Tensor {
  std::string name;
  int64_t rows, cols;
  ElementType element;

  int64_t bytes() const;
};

/// M × N accumulators of a product over K; without k the program runs over a stored matrix (map).
struct Sizes {
  int64_t m, n;
  std::optional<int64_t> k;
};

/// Throws UsageError naming the flag: sizes from 1 to 2^31 - 1 with FLOPs below 2^60, and an N that the program's pairs divide.
void check(const Program& program, const Sizes& sizes);

/// The program over the accumulators, as one kernel. factors: the element type of a and b, or of the stored matrix.
Kernel fused(const Program& program, const Sizes& sizes, ElementType factors);

/// Whether a product's own store does what the program does (Store, AccumulateInto): there is nothing to separate.
bool is_plain(const Program& program);

/// The same without fusion, everything else the same: a product that stores its accumulators once in the program's E, and one
/// pass that reads them back, with the program's operands. A program over a stored matrix, and a plain one, is one kernel
/// either way.
std::vector<Kernel> separate_pass(const Program& program, const Sizes& sizes, ElementType factors);

}  // namespace coda::explain
