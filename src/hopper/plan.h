// How a product of the GPU engine is run: fused in one of the program's kernels, or in two passes through the workspace. Nothing
// here needs a GPU.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

/// A product's sizes: accumulators m × n, over a depth of k.
struct Shape {
  int64_t m, n, k;
  bool operator==(const Shape&) const = default;
};

/// How a fused kernel is run. Any plan of a call leaves the same bits.
struct Plan {
  const coda::detail::HopperKernel* kernel = nullptr;  // null: two passes
  int band = 1;                                        // one of kBands
  bool tuned = false;
  std::string reason{};  // against every fused kernel; empty with one
};

/// Orders of tiles that plans choose from: rows of clusters, two tiles each, that run side by side (coda/hopper/bands.h).
/// The first keeps what is in flight nearest to a square where the matrix is large.
inline constexpr int kBands[] = {8, 4, 2, 1};

/// Multiprocessors of an H100 and an H200 (SXM), for which plans are made where no GPU is asked.
inline constexpr int kMultiprocessors = 132;

/// What a plan is chosen for.
struct Problem {
  coda::detail::Form form;
  Shape shape;
  double epilogue_tiles;
  int multiprocessors;
};
Problem problem_of(const coda::detail::Factor& a, const coda::detail::Factor& b,
                   const coda::detail::ProgramInfo& program, int multiprocessors);
/// What a program does to a tile of accumulators, in tiles of their size that it loads or stores; angles of pairs and a
/// log-sum-exp count as what they were measured to take.
double epilogue_tiles(std::span<const Field> fields);

/// Waves of tiles over the multiprocessors, two tiles a cluster.
int64_t waves(const Problem& problem, coda::detail::HopperTile tile);
/// Time that a plan is predicted to take, in units of no meaning beyond one product: waves times the cost of a tile times what its order's
/// reads cost. Every factor is a measurement (docs/measurements.md).
double score(const Problem& problem, coda::detail::HopperTile tile, int band);

/// A kernel in an order, and what it lost by.
struct Candidate {
  const coda::detail::HopperKernel* kernel;
  int band;
  double score;
  std::string reason;
};
/// All of the form, best first.
std::vector<Candidate> candidates(const Problem& problem, const coda::detail::HopperKernels& kernels);

/// What the GPU engine refuses besides what every engine does (call_check.h): factors of float or of 2^31 rows, forms that the program
/// was not compiled for. Throws OperandError.
void check_factors(const coda::detail::Factor& a, const coda::detail::Factor& b,
                   const coda::detail::HopperKernels& kernels);

/// The slices of a's depth that there can be of those that are asked for. Throws OperandError if that is less than 1, or more than leave
/// accumulators of as many rows as TMA counts.
int slices_of(const coda::detail::Factor& a, DepthSlices asked);
/// Slices by which a product of few tiles is predicted to take least; 1 where that is not 5 % less than whole, by the better of the tiles
/// that most programs have.
int best_slices(const Problem& problem);

/// Bytes that two passes need: copies of the factors that TMA cannot reach, then the accumulators.
struct Workspace {
  int64_t a, b, accumulators;
  int64_t bytes() const { return a + b + accumulators; }
};
/// Of so many slices of the depth, if there is more than one.
int64_t accumulator_bytes(int64_t m, int64_t n, int slices);
Workspace workspace_of(const coda::detail::Factor& a, const coda::detail::Factor& b, int slices = 1);
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

/// The best of the candidates; no kernel if the program has none of the form.
Plan untuned(const Problem& problem, const coda::detail::HopperKernels& kernels);

class TunedPlans;

/// As it was tuned on the card, where that is a candidate, or untuned.
Plan choose(const Problem& problem, const coda::detail::HopperKernels& kernels, std::string_view card,
            const TunedPlans& tuned);
/// How this call is run: so, if it can be fused. The call has been checked.
Plan choose(const coda::detail::Factor& a, const coda::detail::Factor& b, const coda::detail::ProgramInfo& program,
            const coda::detail::HopperKernels& kernels, int multiprocessors, std::string_view card,
            const TunedPlans& tuned);
/// The same where only that it is fused or not matters: of no card, untuned.
Plan choose(const coda::detail::Factor& a, const coda::detail::Factor& b, const coda::detail::ProgramInfo& program,
            const coda::detail::HopperKernels& kernels);
/// "cooperative 128x256, 4 rows of clusters side by side".
std::string text_of(coda::detail::HopperTile tile, int band);

}  // namespace coda::hopper
