// The programs of the library by name: what `coda explain` knows of each, all of it from describe().
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coda/program.h"

namespace coda::explain {

struct Program {
  std::string name;                  // RmsNormSwiGlu
  ElementType element;               // E of Tensors<E>
  std::vector<std::string> options;  // {DropGateUp}, every option spelled out
  std::string formula;               // what the epilogue does, in the names of docs/numerics.md
  std::vector<Field> fields;
  bool pairs;     // the call operator takes pairs of columns: N is a multiple of 16
  int passes;     // measure passes in front of the call operator
  int col_group;  // least common multiple of the widths of its row reductions; 1 without any
  int row_group;  // the same of the heights of its column reductions

  /// RmsNormSwiGlu<bf16, DropGateUp>; options that the type has by default are left out, as one writes it.
  std::string spelling() const;
};

/// All of them. Of one name the one with the default options comes first.
std::span<const Program> programs();

/// The program that a spelling means: `RmsNormSwiGlu`, `RmsNormSwiGlu<float>`, `RmsNormSwiGlu<bf16, DropGateUp>`,
/// `coda::RmsNormSwiGlu<coda::Tensors<coda::bf16>, coda::DropGateUp>`. bf16 and default options where nothing is said.
/// Throws UsageError listing the names, or the spellings of this name.
const Program& find_program(std::string_view spelling);

/// `bf16`, `float`, `int32`, `MaxSum`.
std::string_view name(ElementType element);

}  // namespace coda::explain
