// The front door: products whose accumulators an epilogue program takes, and programs over stored tiles.
#pragma once
#include <cstdint>
#include <span>

#include "coda/cpu.h"
#include "coda/error.h"
#include "coda/isa.h"
#include "coda/program.h"

namespace coda {

namespace detail {

/// A field of a program as the caller filled it in. A vector is a matrix of one row.
struct Operand {
  Field field;
  const void* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
};

/// One factor of a product a·bᵀ: [rows, depth], or stored transposed as [depth, rows].
struct Factor {
  const void* data = nullptr;
  ElementType element = ElementType::float32;
  int64_t rows = 0, depth = 0, stride = 0;
  bool transposed = false;
};

/// Accumulators of rows [row, row + rows) and columns [col, col + cols) of an [m, n] product, row-major. acc may be read up
/// to the next multiple of 32 columns and is overwritten where measure() assigns it.
struct Block {
  float* acc;
  int64_t acc_stride;
  int64_t row, col, rows, cols;
  int64_t m, n;
};

/// Runs program P over a block. Instantiated once per instruction set, in kernel files only (coda/kernels.h).
template <class P, class Isa>
void epilogue(const void* program, const Block& block);
using Epilogue = void (*)(const void* program, const Block& block);

/// What an engine must know of a program besides its operands.
struct ProgramInfo {
  const void* program;
  std::span<const Operand> operands;
  bool pairs;     // the call operator takes pairs of columns
  int col_group;  // least common multiple of the widths of its row reductions; 1 without any
  int row_group;  // the same of the heights of its column reductions
};

/// A program's instantiations on the CPU.
struct CpuKernels {
  Epilogue generic, avx2, avx512;
};
template <class P>
CpuKernels cpu_kernels() {
  return {&epilogue<P, isa::generic>, &epilogue<P, isa::avx2>, &epilogue<P, isa::avx512>};
}

/// Checks everything, then computes. Defined in src/gemm.cc.
void run_product(Cpu& cpu, const Factor& a, const Factor& b, const ProgramInfo& program, const CpuKernels& kernels);
void run_map(Cpu& cpu, const Factor& tile, const ProgramInfo& program, const CpuKernels& kernels);

template <class T>
constexpr ElementType factor_element() {
  static_assert(std::is_same_v<std::remove_const_t<T>, float> || std::is_same_v<std::remove_const_t<T>, bf16>,
                "a product's factors are matrices of float or bf16");
  return element_type<std::remove_const_t<T>, float>();
}
template <class T>
Factor factor(Matrix<T> x) {
  return {x.data, factor_element<T>(), x.rows, x.cols, x.stride, false};
}
template <class T>
Factor factor(Transposed<T> x) {
  return {x.of.data, factor_element<T>(), x.of.cols, x.of.rows, x.of.stride, true};
}

template <class T>
Operand operand(const Field& field, const Matrix<T>& x) {
  return {field, x.data, x.rows, x.cols, x.stride};
}
template <class T>
Operand operand(const Field& field, const Vector<T>& x) {
  return {field, x.data, 1, x.size, x.size};
}
template <class T>
Operand operand(const Field& field, T* const& pointer) {
  return {field, pointer, 1, 1, 1};
}
inline Operand operand(const Field& field, const Nothing&) {
  return {field};
}
/// A number, or a function object with its numbers.
template <class T>
requires(std::is_arithmetic_v<T> || std::is_class_v<T>) Operand operand(const Field& field, const T&) {
  return {field};
}

constexpr int least_common_multiple(int a, int b) {
  int x = a, y = b;
  while (y != 0) {
    const int r = x % y;
    x = y;
    y = r;
  }
  return a / x * b;
}

template <class P, int... I>
constexpr int column_group(std::integer_sequence<int, I...>) {
  int group = 1;
  ((group = group_columns<P, I>() > 0 ? least_common_multiple(group, group_columns<P, I>()) : group), ...);
  return group;
}
template <class P, int... I>
constexpr int row_group(std::integer_sequence<int, I...>) {
  int group = 1;
  ((group = field_info<P, I>::kind == Kind::col_sum ? least_common_multiple(group, field_info<P, I>::extent) : group),
   ...);
  return group;
}

template <class P, class Run>
void with_program(const P& program, Run&& run) {
  check_program<P>();
  static constexpr auto fields = describe<P>();
  constexpr auto numbers = std::make_integer_sequence<int, field_count<P>>{};
  with_fields<field_count<P>>(program, [&](const auto&... field) {
    int i = 0;
    const std::array<Operand, sizeof...(field)> operands = {operand(fields[i++], field)...};
    run(ProgramInfo{.program = &program,
                    .operands = operands,
                    .pairs = takes_pair<P>,
                    .col_group = column_group<P>(numbers),
                    .row_group = row_group<P>(numbers)});
  });
}

}  // namespace detail

/// Runs program over the accumulators of a·bᵀ, a [M, K], b [N, K], fp32 accumulation. Each factor is a Matrix of float or
/// bf16, or transpose(matrix) where the matrix is stored the other way: x·Wᵀ is gemm(cpu, x, w, …), dy·W is
/// gemm(cpu, dy, transpose(w), …), dyᵀ·x is gemm(cpu, transpose(dy), transpose(x), …). Any M, N, K from 0.
/// Throws OperandError (or OverlapError) naming the operand, what it is and what it needs, before anything is written.
template <class A, class B, class P>
void gemm(Cpu& cpu, const A& a, const B& b, const P& program) {
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    detail::run_product(cpu, detail::factor(a), detail::factor(b), info, detail::cpu_kernels<P>());
  });
}

/// Runs program over a stored matrix of float or bf16, [M, N], in place of a product's accumulators.
template <class T, class P>
void map(Cpu& cpu, const Matrix<T>& x, const P& program) {
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    detail::run_map(cpu, detail::factor(x), info, detail::cpu_kernels<P>());
  });
}

}  // namespace coda
