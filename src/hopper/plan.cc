#include "plan.h"

#include <fmt/format.h>

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

/// Why memory of `rows` rows, `stride` elements apart, cannot be reached by TMA.
std::string obstacle(const std::string& name, const void* data, int64_t rows, int64_t stride, int64_t element_bytes) {
  if (reinterpret_cast<uintptr_t>(data) % kTmaBytes != 0) return name + " is not at a multiple of 16 bytes";
  if (rows > 1 && stride * element_bytes % kTmaBytes != 0)
    return fmt::format("rows of {} are not a multiple of 16 bytes apart", name);
  return {};
}

}  // namespace

std::string obstacle(const std::string& name, const Factor& x) {
  const int64_t rows = x.transposed ? x.depth : x.rows;
  return obstacle(name, x.data, rows, x.stride, coda::detail::bytes_of(x.element));
}

std::string obstacle(const Operand& operand) {
  const std::string name(operand.field.name);
  switch (operand.field.kind) {
    case Kind::tile:
    case Kind::half_tile:
    case Kind::double_tile:
    case Kind::accumulate:
      return obstacle(name, operand.data, operand.rows, operand.stride, coda::detail::bytes_of(operand.field.element));
    case Kind::per_col:
    case Kind::per_pair:
      if (reinterpret_cast<uintptr_t>(operand.data) % 8 != 0) return name + " is not at a multiple of 8 bytes";
      return {};
    default:
      return {};
  }
}

Plan choose(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels) {
  if (a.depth == 0) return {.reason = "there is nothing to multiply"};
  std::string reason = obstacle("a", a);
  if (reason.empty()) reason = obstacle("b", b);
  for (const Operand& operand : program.operands)
    if (reason.empty()) reason = obstacle(operand);
  if (!reason.empty()) return {.reason = reason};
  const Form form = *form_of(a, b);
  Plan plan;
  for (const HopperKernel& kernel : kernels.products)
    if (kernel.form == form && plan.kernel == nullptr) plan.kernel = &kernel;
  if (plan.kernel == nullptr) return {.reason = "a reduction of the program is wider than every tile"};
  const TileSize tile = size_of(plan.kernel->tile);
  // Tiles that run at the same time cover a nearly square part of the product, so that L2 serves both factors. A swizzle that does
  // not divide the number of tiles makes CUTLASS add empty ones.
  const int64_t row_tiles = (a.rows + tile.rows - 1) / tile.rows;
  for (int swizzle : {8, 4, 2})
    if (row_tiles / 2 % swizzle == 0 && plan.swizzle == 1) plan.swizzle = swizzle;
  plan.reason = fmt::format("{}, tiles in strips of {}", name(plan.kernel->tile), plan.swizzle);
  return plan;
}

}  // namespace coda::hopper
