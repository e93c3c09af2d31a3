#include "plan.h"

#include <fmt/format.h>

#include "align.h"
#include "operand_shape.h"

namespace coda::hopper {

using coda::detail::Factor;
using coda::detail::Form;
using coda::detail::HopperKernel;
using coda::detail::HopperKernels;
using coda::detail::HopperTile;
using coda::detail::Operand;
using coda::detail::ProgramInfo;

const char* name(HopperTile tile) {
  switch (tile) {
    case HopperTile::pingpong_128x128:
      return "pingpong 128x128";
    case HopperTile::cooperative_128x128:
      return "cooperative 128x128";
    case HopperTile::pingpong_64x256:
      return "pingpong 64x256";
    case HopperTile::cooperative_128x256:
      return "cooperative 128x256";
    case HopperTile::cooperative_256x128:
      return "cooperative 256x128";
  }
  return "";
}

const char* name(Form form) {
  return form == Form::TN ? "TN" : form == Form::NN ? "NN" : "NT";
}

TileSize size_of(HopperTile tile) {
  switch (tile) {
    case HopperTile::pingpong_64x256:
      return {64, 256};
    case HopperTile::cooperative_128x256:
      return {128, 256};
    case HopperTile::cooperative_256x128:
      return {256, 128};
    case HopperTile::pingpong_128x128:
    case HopperTile::cooperative_128x128:
      break;
  }
  return {128, 128};
}

std::optional<Form> form_of(const Factor& a, const Factor& b) {
  if (!a.transposed) return b.transposed ? Form::NN : Form::TN;
  return b.transposed ? std::optional(Form::NT) : std::nullopt;
}

namespace {

constexpr int64_t kTmaBytes = 16;

int64_t round_up(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// Why memory of `rows` rows, `stride` elements apart, cannot be reached by TMA.
std::string obstacle_to_rows(const std::string& name, const void* data, int64_t rows, int64_t stride,
                             int64_t element_bytes) {
  if (reinterpret_cast<uintptr_t>(data) % kTmaBytes != 0) return name + " is not at a multiple of 16 bytes";
  if (rows > 1 && stride * element_bytes % kTmaBytes != 0)
    return fmt::format("rows of {} are not a multiple of 16 bytes apart", name);
  return {};
}

}  // namespace

std::string obstacle(const std::string& name, const Factor& x) {
  const int64_t rows = x.transposed ? x.depth : x.rows;
  return obstacle_to_rows(name, x.data, rows, x.stride, coda::detail::bytes_of(x.element));
}

std::string obstacle(const Operand& operand) {
  const std::string name(operand.field.name);
  switch (operand.field.kind) {
    case Kind::tile:
    case Kind::half_tile:
    case Kind::double_tile:
    case Kind::accumulate:
      if (operand.field.direction == Direction::out &&
          operand.cols * coda::detail::bytes_of(operand.field.element) % kTmaBytes != 0)
        return fmt::format("rows of {} are not a multiple of 16 bytes long", name);
      return obstacle_to_rows(name, operand.data, operand.rows, operand.stride,
                              coda::detail::bytes_of(operand.field.element));
    case Kind::per_col:
    case Kind::per_pair:
      if (reinterpret_cast<uintptr_t>(operand.data) % 8 != 0) return name + " is not at a multiple of 8 bytes";
      return {};
    default:
      return {};
  }
}

namespace {

/// Rows and columns at the edge of a tile are counted in 32 bits.
constexpr int64_t kMostOfSide = (int64_t{1} << 31) - 512;

void check_factor(const std::string& name, const Factor& x) {
  if (x.element != ElementType::bfloat16)
    throw OperandError(name, "a matrix of float", "one of bf16, which is what the GPU engine multiplies");
  if (x.rows > kMostOfSide || x.depth > kMostOfSide)
    throw OperandError(name, fmt::format("{} x {}", x.rows, x.depth),
                       fmt::format("at most {} rows and columns", kMostOfSide));
}

int64_t copy_bytes(const char* name, const Factor& x) {
  if (obstacle(name, x).empty()) return 0;
  const auto [rows, cols] = stored_size(x);
  return round_up(rows * aligned_stride(cols) * int64_t{sizeof(bf16)});
}

}  // namespace

void check_factors(const Factor& a, const Factor& b, const HopperKernels& kernels) {
  check_factor("a", a);
  check_factor("b", b);
  const auto form = form_of(a, b);
  if (!form)
    throw OperandError("a", "transposed beside a b that is not", "one of the forms x Wᵀ, dy W and dyᵀ x on a GPU");
  for (const HopperKernel& kernel : kernels.products)
    if (kernel.form == *form) return;
  throw OperandError("b", fmt::format("a factor of a product of form {}", name(*form)),
                     "a form that CODA_HOPPER_PROGRAM names for this program");
}

Workspace workspace_of(const Factor& a, const Factor& b) {
  return {.a = copy_bytes("a", a),
          .b = copy_bytes("b", b),
          .accumulators = round_up(a.rows * accumulator_stride(b.rows) * int64_t{sizeof(float)})};
}

namespace {

/// Tiles run along rows of clusters (of two tiles), so many rows side by side: what is read of b is read once for all of them. Of eight
/// orders this is within 4 % of the best for 37 shapes, 1 % in the geometric mean (docs/measurements.md); tiles down the columns are up
/// to 50 % slower. A number that does not divide the rows makes CUTLASS add empty ones.
int swizzle_for(Form form, int64_t m, HopperTile tile, const Factor& b) {
  constexpr int64_t kFarBeyondL2 = int64_t{256} << 20;
  const int64_t bytes_of_b = b.rows * b.depth * int64_t{sizeof(bf16)};
  const int64_t cluster_rows = (m + 2 * size_of(tile).rows - 1) / (2 * size_of(tile).rows);
  int swizzle = form != Form::TN ? 2 : bytes_of_b > kFarBeyondL2 ? 8 : 4;
  while (cluster_rows % swizzle != 0) swizzle /= 2;
  return swizzle;
}

}  // namespace

Plan plan_of_kernel(Form form, int64_t m, const Factor& b, const HopperKernels& kernels) {
  for (const HopperKernel& kernel : kernels.products) {
    if (kernel.form != form) continue;
    const int swizzle = swizzle_for(form, m, kernel.tile, b);
    return {.kernel = &kernel,
            .swizzle = swizzle,
            .reason = fmt::format("{} tiles, {} rows of clusters side by side", name(kernel.tile), swizzle)};
  }
  return {};
}

Plan choose(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels) {
  if (a.depth == 0) return {.reason = "there is nothing to multiply"};
  std::string reason = obstacle("a", a);
  if (reason.empty()) reason = obstacle("b", b);
  for (const Operand& operand : program.operands)
    if (reason.empty()) reason = obstacle(operand);
  if (!reason.empty()) return {.reason = reason};
  const Plan plan = plan_of_kernel(*form_of(a, b), a.rows, b, kernels);
  return plan.kernel != nullptr ? plan : Plan{.reason = "a reduction of the program is wider than every tile"};
}

}  // namespace coda::hopper
