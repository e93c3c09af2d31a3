#include "explain/cost.h"

#include <fmt/format.h>

#include <algorithm>

#include "coda/error.h"
#include "operand_shape.h"

namespace coda::explain {
namespace {

constexpr int64_t kMaxSize = (int64_t{1} << 31) - 1;
// All that is added up from a product's FLOPs stays below 2^63.
constexpr double kMaxFlops = double(int64_t{1} << 60);

void check_size(const char* flag, int64_t size) {
  if (size < 1 || size > kMaxSize) throw UsageError(fmt::format("{} is {}; it needs 1 to {}", flag, size, kMaxSize));
}

Kernel product(const Sizes& sizes, ElementType factors) {
  const int64_t k = sizes.k.value();
  return {.name = "GEMM",
          .flops = 2 * sizes.m * sizes.n * k,
          .read = (sizes.m + sizes.n) * k * detail::bytes_of(factors),
          .written = 0};
}

/// What the program itself moves, beside its accumulators.
void add_operands(Kernel& kernel, const Program& program, const Sizes& sizes) {
  for (const Field& field : program.fields) {
    if (detail::has_no_memory(field)) continue;
    const detail::OperandShape shape = detail::needed_shape(field, sizes.m, sizes.n);
    const int64_t bytes = shape.rows * shape.cols * detail::bytes_of(field.element);
    if (field.direction == Direction::in || field.kind == Kind::accumulate) kernel.read += bytes;
    if (field.direction == Direction::out) kernel.written += bytes;
  }
}

}  // namespace

int64_t Tensor::bytes() const {
  return rows * cols * detail::bytes_of(element);
}

void check(const Program& program, const Sizes& sizes) {
  check_size("--m", sizes.m);
  check_size("--n", sizes.n);
  if (sizes.k) check_size("--k", *sizes.k);
  const double elements = 2.0 * static_cast<double>(sizes.m) * static_cast<double>(sizes.n);
  // 16 bytes an accumulator is more than any operand has.
  if (std::max(elements * 16, elements * static_cast<double>(sizes.k.value_or(1))) >= kMaxFlops)
    throw UsageError(
        fmt::format("--m {} and --n {} are too large; they need a product below 2^60 FLOPs", sizes.m, sizes.n));
  if (program.pairs && sizes.n % 16 != 0)
    throw UsageError(
        fmt::format("--n is {}; {} needs a multiple of 16, since it takes pairs in blocks of 8 and 8 columns", sizes.n,
                    program.name));
  for (const Field& field : program.fields)
    if (field.kind == Kind::double_tile && sizes.n % 8 != 0)
      throw UsageError(
          fmt::format("--n is {}; {} needs a multiple of 8, since {} holds pairs in blocks of 8 and 8 columns", sizes.n,
                      program.name, field.name));
}

Kernel fused(const Program& program, const Sizes& sizes, ElementType factors) {
  Kernel kernel = sizes.k ? product(sizes, factors)
                          : Kernel{.name = "", .flops = 0, .read = sizes.m * sizes.n * detail::bytes_of(factors)};
  kernel.name = program.spelling();
  add_operands(kernel, program, sizes);
  return kernel;
}

bool is_plain(const Program& program) {
  return program.fields.size() == 1 && program.fields[0].direction == Direction::out &&
         (program.fields[0].kind == Kind::tile || program.fields[0].kind == Kind::accumulate);
}

std::vector<Kernel> separate_pass(const Program& program, const Sizes& sizes, ElementType factors) {
  if (!sizes.k || is_plain(program)) return {fused(program, sizes, factors)};
  const int64_t accumulators = sizes.m * sizes.n * detail::bytes_of(program.element);
  Kernel gemm = product(sizes, factors);
  gemm.written = accumulators;
  Kernel pass{.name = program.name, .flops = 0, .read = accumulators};
  add_operands(pass, program, sizes);
  return {gemm, pass};
}

}  // namespace coda::explain
