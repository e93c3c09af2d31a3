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

/// Why a factor or an operand cannot be reached by TMA, in words; empty if it can. What TMA writes ends with 16 whole bytes: where the
/// last ones of a row are fewer it writes past them (coda verify sees it do so).
std::string obstacle(const std::string& name, const coda::detail::Factor& x);
std::string obstacle(const coda::detail::Operand& operand);

struct Plan {
  const coda::detail::HopperKernel* kernel = nullptr;  // null: two passes
  int swizzle = 1;
  bool along_m = false;
  std::string reason;  // for this kernel, or against every fused one
};

/// What the GPU engine refuses besides what every engine does (call_check.h): factors of float or of 2^31 rows, forms that the program
/// was not compiled for. Throws OperandError.
void check_factors(const coda::detail::Factor& a, const coda::detail::Factor& b,
                   const coda::detail::HopperKernels& kernels);

/// Bytes that two passes need: copies of the factors that TMA cannot reach, then the accumulators.
struct Workspace {
  int64_t a, b, accumulators;
  int64_t bytes() const { return a + b + accumulators; }
};
Workspace workspace_of(const coda::detail::Factor& a, const coda::detail::Factor& b);
/// Elements between rows of accumulators there.
constexpr int64_t accumulator_stride(int64_t n) {
  return (n + 3) / 4 * 4;
}
/// A factor as it lies in memory.
struct StoredSize {
  int64_t rows, cols;
};
constexpr StoredSize stored_size(const coda::detail::Factor& x) {
  return x.transposed ? StoredSize{x.depth, x.rows} : StoredSize{x.rows, x.depth};
}

/// The kernel for a form and how it goes through its tiles; none if the program has no kernel of the form.
Plan plan_of_kernel(coda::detail::Form form, int64_t m, const coda::detail::Factor& b,
                    const coda::detail::HopperKernels& kernels);

/// How this call is run. The call has been checked.
Plan choose(const coda::detail::Factor& a, const coda::detail::Factor& b, const coda::detail::ProgramInfo& program,
            const coda::detail::HopperKernels& kernels);

}  // namespace coda::hopper
