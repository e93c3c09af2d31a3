// The memory that an operand of a program needs beside M × N accumulators.
#pragma once
#include "coda/program.h"

namespace coda::detail {

constexpr int64_t bytes_of(ElementType element) {
  switch (element) {
    case ElementType::bfloat16:
      return sizeof(bf16);
    case ElementType::max_sum:
      return sizeof(MaxSum);
    case ElementType::float32:
    case ElementType::int32:
      break;
  }
  return 4;
}

/// Whether the caller gives no memory for it.
constexpr bool has_no_memory(const Field& field) {
  return field.kind == Kind::scalar || field.kind == Kind::number || field.kind == Kind::off ||
         field.direction == Direction::local;
}

/// Slots of a row reduction over 128 columns each, as wide as those of the library's programs are.
constexpr int64_t row_slot_count(int64_t cols) {
  return (cols + 127) / 128;
}
/// And of a column reduction, over 64 rows each.
constexpr int64_t column_slot_count(int64_t rows) {
  return (rows + 63) / 64;
}

struct OperandShape {
  int64_t rows, cols;
  const char* formula;
};

/// The shape that an operand with memory must have; of a PerPair, which may be any period, the longest.
constexpr OperandShape needed_shape(const Field& field, int64_t m, int64_t n) {
  const auto slots = [&](int64_t size) { return (size + field.extent - 1) / field.extent; };
  switch (field.kind) {
    case Kind::per_row:
      return {1, m, "[M]"};
    case Kind::per_col:
      return {1, n, "[N]"};
    case Kind::per_pair:
      return {1, n / 2, "[N/2]"};
    case Kind::half_tile:
      return {m, n / 2, "[M, N/2]"};
    case Kind::double_tile:
      return {m, 2 * n, "[M, 2N]"};
    case Kind::row_sum:
    case Kind::row_max:
    case Kind::row_log_sum_exp:
      return {slots(n), m, "[slots, M]"};
    case Kind::col_sum:
      return {slots(m), n, "[slots, N]"};
    case Kind::device_scalar:
      return {1, 1, "one value"};
    default:
      return {m, n, "[M, N]"};
  }
}

}  // namespace coda::detail
