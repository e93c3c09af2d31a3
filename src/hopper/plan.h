// How a product of the GPU engine is run: fused in one of the program's kernels, or in two passes through the workspace. Nothing
// here needs a GPU.
#pragma once
#include <optional>
#include <string>

#include "coda/gpu.h"

namespace coda::hopper {

const char* name(coda::detail::HopperTile tile);
const char* name(coda::detail::Form form);
/// Rows and columns of a tile.
struct TileSize {
  int rows, cols;
};
TileSize size_of(coda::detail::HopperTile tile);

/// The form of a·bᵀ; none if only a lies transposed, which no program of a Llama needs.
std::optional<coda::detail::Form> form_of(const coda::detail::Factor& a, const coda::detail::Factor& b);

/// Why a factor or an operand cannot be reached by TMA, in words; empty if it can.
std::string obstacle(const std::string& name, const coda::detail::Factor& x);
std::string obstacle(const coda::detail::Operand& operand);

struct Plan {
  const coda::detail::HopperKernel* kernel = nullptr;  // null: two passes
  int swizzle = 1;
  bool along_m = false;
  std::string reason;  // for this kernel, or against every fused one
};

/// How this call is run. The call has been checked (call_check.h) and is of a form that the program has kernels for.
Plan choose(const coda::detail::Factor& a, const coda::detail::Factor& b, const coda::detail::ProgramInfo& program,
            const coda::detail::HopperKernels& kernels);

}  // namespace coda::hopper
