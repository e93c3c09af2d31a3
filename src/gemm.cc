// The front door: everything that can be wrong with a call is said here, before anything is written.
#include "coda/gemm.h"

#include <fmt/format.h>

#include <limits>
#include <string>
#include <vector>

#include "call_check.h"
#include "cpu/product.h"
#include "operand_shape.h"

namespace coda::detail {

namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();  // rows and columns are 32-bit inside a program

std::string shape(int64_t rows, int64_t cols) {
  return fmt::format("{}x{}", rows, cols);
}

/// Memory of one operand or factor.
struct Extent {
  std::string name;
  const char* data;
  int64_t rows, row_bytes, stride_bytes;
  bool written;
  Kind kind;

  const char* end() const { return data + (rows - 1) * stride_bytes + row_bytes; }
};

void check_matrix(const std::string& name, const void* data, ElementType element, int64_t rows, int64_t cols,
                  int64_t stride) {
  if (rows < 0 || cols < 0) throw OperandError(name, "of shape " + shape(rows, cols), "sizes of 0 or more");
  if (rows > kMaxSize || cols > kMaxSize)
    throw OperandError(name, "of shape " + shape(rows, cols), fmt::format("at most {} rows and columns", kMaxSize));
  if (rows == 0 || cols == 0) return;
  if (data == nullptr) throw OperandError(name, "null", fmt::format("memory for {} elements", shape(rows, cols)));
  if (rows > 1 && stride < cols)
    throw OperandError(name, fmt::format("of stride {}", stride), fmt::format("at least its {} columns", cols));
  if (rows > 1 && stride > std::numeric_limits<int64_t>::max() / rows / bytes_of(element))
    throw OperandError(name, fmt::format("of {} rows with stride {}", rows, stride), "a size below 2^63 bytes");
  const auto alignment = static_cast<uintptr_t>(element == ElementType::bfloat16 ? 2 : 4);
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0)
    throw OperandError(name, fmt::format("at address {}", fmt::ptr(data)),
                       fmt::format("an address that is a multiple of {}", alignment));
}

void check_operand(const Operand& operand, int64_t m, int64_t n) {
  const std::string name(operand.field.name);
  const Kind kind = operand.field.kind;
  if (has_no_memory(operand.field)) return;
  check_matrix(name, operand.data, operand.field.element, operand.rows, operand.cols, operand.stride);
  if (kind == Kind::per_pair) {
    const int64_t period = operand.cols;
    if (n > 0 && (period <= 0 || period % 8 != 0 || (n / 2) % period != 0))
      throw OperandError(name, fmt::format("{} values", period),
                         fmt::format("a multiple of 8 that divides the {} pairs of a row", n / 2));
    return;
  }
  const OperandShape need = needed_shape(operand.field, m, n);
  if (operand.rows == need.rows && operand.cols == need.cols) return;
  const bool vector = kind == Kind::per_row || kind == Kind::per_col;
  const std::string slots = operand.field.extent > 0 ? fmt::format(", a slot for every {}", operand.field.extent) : "";
  throw OperandError(name, vector ? fmt::format("{} values", operand.cols) : shape(operand.rows, operand.cols),
                     vector ? fmt::format("{} ({})", need.cols, need.formula)
                            : fmt::format("{} ({}{})", shape(need.rows, need.cols), need.formula, slots));
}

void check_pairs(const ProgramInfo& program, const std::string& factor, int64_t n) {
  if (program.pairs && n % 16 != 0)
    throw OperandError(factor, fmt::format("{} wide", n),
                       "a multiple of 16, since the program takes pairs in blocks of 8 and 8 columns");
  for (const Operand& operand : program.operands)
    if (operand.field.kind == Kind::double_tile && n % 8 != 0)
      throw OperandError(
          factor, fmt::format("{} wide", n),
          fmt::format("a multiple of 8, since {} holds pairs in blocks of 8 and 8 columns", operand.field.name));
}

/// Whether two extents share a byte. Views of disjoint columns of one matrix do not.
bool overlap(const Extent& a, const Extent& b) {
  if (a.data >= b.end() || b.data >= a.end()) return false;
  if (a.stride_bytes == b.stride_bytes && a.rows > 1 && b.rows > 1) {
    const int64_t stride = a.stride_bytes;
    const int64_t offset = ((b.data - a.data) % stride + stride) % stride;  // of b's rows in a's
    return offset < a.row_bytes || offset + b.row_bytes > stride;
  }
  return true;
}

/// The same elements, each read by the step that overwrites it.
bool in_place(const Extent& a, const Extent& b) {
  return a.data == b.data && a.rows == b.rows && a.row_bytes == b.row_bytes &&
         (a.stride_bytes == b.stride_bytes || a.rows == 1) && a.kind == b.kind && !(a.written && b.written);
}

Extent extent_of(const std::string& name, const void* data, ElementType element, int64_t rows, int64_t cols,
                 int64_t stride, bool written, Kind kind) {
  const int64_t size = bytes_of(element);
  return {name, static_cast<const char*>(data), rows, cols * size, std::max(stride, cols) * size, written, kind};
}

void check_overlap(std::vector<Extent> extents, const ProgramInfo& program) {
  for (const Operand& operand : program.operands) {
    if (has_no_memory(operand.field) || operand.rows == 0 || operand.cols == 0) continue;
    extents.push_back(extent_of(std::string(operand.field.name), operand.data, operand.field.element, operand.rows,
                                operand.cols, operand.stride, operand.field.direction == Direction::out,
                                operand.field.kind));
  }
  for (size_t i = 0; i < extents.size(); ++i)
    for (size_t j = i + 1; j < extents.size(); ++j) {
      const Extent &a = extents[i], &b = extents[j];
      if (!(a.written || b.written) || !overlap(a, b) || in_place(a, b)) continue;
      const Extent &written = b.written ? b : a, &other = b.written ? a : b;
      throw OverlapError(written.name, "an output that shares memory with " + other.name,
                         "memory of its own, or exactly the tensor of an input tile");
    }
}

void check_factor(const std::string& name, const Factor& x) {
  const int64_t rows = x.transposed ? x.depth : x.rows, cols = x.transposed ? x.rows : x.depth;
  check_matrix(name, x.data, x.element, rows, cols, x.stride);
}

void add_factor(std::vector<Extent>& extents, const std::string& name, const Factor& x, Kind kind) {
  const int64_t rows = x.transposed ? x.depth : x.rows, cols = x.transposed ? x.rows : x.depth;
  if (rows > 0 && cols > 0) extents.push_back(extent_of(name, x.data, x.element, rows, cols, x.stride, false, kind));
}

}  // namespace

void check_product(const Factor& a, const Factor& b, const ProgramInfo& program) {
  check_factor("a", a);
  check_factor("b", b);
  if (a.depth != b.depth)
    throw OperandError("b", fmt::format("[N, K] = {}", shape(b.rows, b.depth)),
                       fmt::format("the K = {} of a", a.depth));
  check_pairs(program, "b", b.rows);
  for (const Operand& operand : program.operands) check_operand(operand, a.rows, b.rows);
  std::vector<Extent> extents;
  // No program operand is of this kind: a factor is never overwritten in place.
  add_factor(extents, "a", a, Kind::number);
  add_factor(extents, "b", b, Kind::number);
  check_overlap(std::move(extents), program);
}

void check_map(const Factor& tile, const ProgramInfo& program) {
  check_factor("x", tile);
  check_pairs(program, "x", tile.depth);
  for (const Operand& operand : program.operands) check_operand(operand, tile.rows, tile.depth);
  std::vector<Extent> extents;
  add_factor(extents, "x", tile, Kind::tile);
  check_overlap(std::move(extents), program);
}

void run_product(Cpu& cpu, const Factor& a, const Factor& b, const ProgramInfo& program, const CpuKernels& kernels) {
  check_product(a, b, program);
  if (a.rows == 0 || b.rows == 0) return;  // no accumulators, and outputs of no elements
  cpu::product(cpu, a, b, program, kernels);
}

void run_map(Cpu& cpu, const Factor& tile, const ProgramInfo& program, const CpuKernels& kernels) {
  check_map(tile, program);
  if (tile.rows == 0 || tile.depth == 0) return;
  cpu::map_tile(cpu, tile, program, kernels);
}

}  // namespace coda::detail
