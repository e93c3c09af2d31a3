#include "plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "align.h"
#include "operand_shape.h"
#include "plan_cache.h"
#include "sliced_product.h"

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

int slices_of(const Factor& a, DepthSlices asked) {
  if (asked.count < 1) throw OperandError("slices", fmt::format("{}", asked.count), "at least 1");
  const auto slices = static_cast<int>(std::min(int64_t{asked.count}, std::max(int64_t{1}, stages_of(a.depth))));
  const int64_t most = kMostOfSide / std::max<int64_t>(1, slice_rows(a.rows));
  if (slices > 1 && slices > most)
    throw OperandError("slices", fmt::format("{} of {} rows", slices, a.rows), fmt::format("at most {}", most));
  return slices;
}

int64_t accumulator_bytes(int64_t m, int64_t n, int slices) {
  return round_up((slices > 1 ? slices * slice_rows(m) : m) * accumulator_stride(n) * int64_t{sizeof(float)});
}

Workspace workspace_of(const Factor& a, const Factor& b, int slices) {
  return {.a = copy_bytes("a", a), .b = copy_bytes("b", b), .accumulators = accumulator_bytes(a.rows, b.rows, slices)};
}

double epilogue_tiles(std::span<const Field> fields) {
  double tiles = 0;
  for (const Field& field : fields) switch (field.kind) {
      case Kind::tile:
      case Kind::half_tile:  // half the bytes, but of two accumulators
      case Kind::accumulate:
        tiles += 1;
        break;
      case Kind::double_tile:
        tiles += 2;
        break;
      case Kind::row_log_sum_exp:
        tiles += 3;
        break;
      case Kind::per_pair:
        tiles += 0.75;
        break;
      default:
        break;
    }
  return tiles;
}

Problem problem_of(const Factor& a, const Factor& b, const ProgramInfo& program, int multiprocessors) {
  double tiles = 0;
  for (const Operand& operand : program.operands) tiles += epilogue_tiles({&operand.field, 1});
  return {.form = *form_of(a, b),
          .shape = {a.rows, b.rows, a.depth},
          .epilogue_tiles = tiles,
          .multiprocessors = multiprocessors};
}

namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kClusterRows = 2;  // tiles of a cluster, one below the other

int64_t rows_of_clusters(const Problem& problem, HopperTile tile) {
  return ceil_div(problem.shape.m, int64_t{kClusterRows} * size_of(tile).rows);
}
int64_t columns_of_clusters(const Problem& problem, HopperTile tile) {
  return ceil_div(problem.shape.n, size_of(tile).cols);
}

int64_t clusters_of(const Problem& problem, HopperTile tile) {
  return rows_of_clusters(problem, tile) * columns_of_clusters(problem, tile);
}
/// Clusters that a GPU works on at a time.
int64_t clusters_at_a_time(const Problem& problem) {
  return std::max(1, problem.multiprocessors / kClusterRows);
}

bool is_wide(HopperTile tile) {
  return tile == HopperTile::cooperative_128x256 || tile == HopperTile::cooperative_256x128;
}

/// The depth that takes as long as a tile, per 128 × 128 accumulators: the main loop's, and the epilogue's where
/// nothing hides it. Pingpong tiles hide it under the other warp group's main loop, which cooperative tiles cannot;
/// wide ones move fewer bytes for a product through shared memory, and what that saves in power comes back as clock
/// cycles. From a block's products at the card's power limit.
double depth_of_tile(const Problem& problem, HopperTile tile) {
  const auto k = static_cast<double>(problem.shape.k);
  const double further_tiles = problem.epilogue_tiles - 1;
  const double exposed = std::max(0.0, (problem.form == Form::TN ? 165 : 110) + 155 * further_tiles);
  if (tile == HopperTile::cooperative_128x128) return k + 2 * exposed;
  if (!is_wide(tile)) return k;
  // Of NN, which is a backward program's, each further tile takes some of the gain: SwiGluBackward's five at K = 8192 all of it.
  constexpr double kMainLoop[] = {0.92, 0.945, 0.94};
  const double lost = problem.form == Form::NN ? 0.005 * std::max(0.0, further_tiles) : 0;
  return (kMainLoop[static_cast<int>(problem.form)] + lost) * k + exposed;
}

/// What an order's reads cost: what is in flight at a time reads so many rows of a and of b from the second-level cache, and
/// reads them from memory as often as that has lost them. The clock falls with the power that takes, by kReads of the least there could be.
/// A b that stays in the cache is not read again, whatever the order.
double cost_of_order(const Problem& problem, HopperTile tile, int band) {
  constexpr double kReads = 0.035;
  constexpr int64_t kStays = int64_t{23} << 20;  // of an H200's 50 MB, which lie in two halves
  const double cluster_rows = kClusterRows * size_of(tile).rows, cluster_cols = size_of(tile).cols;
  const auto clusters = static_cast<double>(clusters_at_a_time(problem));
  const double rows = std::min<double>(band, static_cast<double>(rows_of_clusters(problem, tile)));
  const double cols = std::min(clusters / rows, static_cast<double>(columns_of_clusters(problem, tile)));
  const bool b_stays = problem.shape.n * problem.shape.k * int64_t{sizeof(bf16)} <= kStays;
  const double reads = clusters / cols * cluster_rows + (b_stays ? 0 : cols * cluster_cols);
  return 1 + kReads * reads / (2 * std::sqrt(clusters * cluster_rows * cluster_cols));
}

}  // namespace

int64_t waves(const Problem& problem, HopperTile tile) {
  return ceil_div(clusters_of(problem, tile), clusters_at_a_time(problem));
}

double score(const Problem& problem, HopperTile tile, int band) {
  const double area = size_of(tile).rows * size_of(tile).cols / (128.0 * 128.0);
  return static_cast<double>(waves(problem, tile)) * area * depth_of_tile(problem, tile) *
         cost_of_order(problem, tile, band);
}

std::string text_of(HopperTile tile, int band) {
  return fmt::format("{}, {} rows of clusters side by side", name(tile), band);
}

Plan untuned(const Problem& problem, const HopperKernels& kernels) {
  Plan best;
  double least = 0;
  for (const HopperKernel& kernel : kernels.products) {
    if (kernel.form != problem.form) continue;
    for (const int band : kBands) {
      const double time = score(problem, kernel.tile, band);
      if (best.kernel != nullptr && time >= least) continue;
      best = {.kernel = &kernel, .band = band};
      least = time;
    }
  }
  return best;
}

namespace {

/// Predicted seconds of a product on an H200 at its power limit. Where tiles leave multiprocessors idle the others' clock is higher.
double seconds(const Problem& problem, HopperTile tile) {
  constexpr double kDepth = 7e-9;  // a wave of 128 × 128 tiles, per depth of 1
  const auto clusters = static_cast<double>(clusters_of(problem, tile)),
             places = static_cast<double>(waves(problem, tile) * clusters_at_a_time(problem));
  return kDepth * score(problem, tile, kBands[0]) * (0.6 + 0.35 * clusters / places);
}

}  // namespace

int best_slices(const Problem& problem) {
  // Float accumulators written once, in whole clusters of tiles, then read and summed; three launches in place of one (docs/measurements.md).
  constexpr double kBytes = 4e12, kLaunches = 10e-6, kLeastGain = 1.05;
  constexpr int kMost = 32;
  constexpr auto kSliced = HopperTile::cooperative_128x256;
  if (waves(problem, kSliced) > 1) return 1;
  int best = 1;
  double least = std::min(seconds(problem, HopperTile::pingpong_128x128), seconds(problem, kSliced)) / kLeastGain;
  for (int slices = 2; slices <= std::min<int64_t>(kMost, stages_of(problem.shape.k)); ++slices) {
    Problem sliced = problem;
    sliced.epilogue_tiles = 1;
    sliced.shape.m = slice_rows(problem.shape.m) * slices;
    sliced.shape.k = ceil_div(stages_of(problem.shape.k), int64_t{slices}) * kSliceStage;
    const auto bytes = static_cast<double>(4 * (sliced.shape.m + 3 * problem.shape.m) * problem.shape.n);
    const double time = seconds(sliced, kSliced) + bytes / kBytes + kLaunches;
    if (time < least) {
      least = time;
      best = slices;
    }
  }
  return best;
}

std::vector<Candidate> candidates(const Problem& problem, const HopperKernels& kernels) {
  std::vector<Candidate> all;
  for (const HopperKernel& kernel : kernels.products) {
    if (kernel.form != problem.form) continue;
    for (const int band : kBands)
      all.push_back({.kernel = &kernel, .band = band, .score = score(problem, kernel.tile, band), .reason = {}});
  }
  std::ranges::stable_sort(all, {}, &Candidate::score);
  for (Candidate& c : all) {
    const Candidate& best = all.front();
    const HopperTile tile = c.kernel->tile, best_tile = best.kernel->tile;
    if (&c == &best) continue;
    c.reason = fmt::format("+{:.1f} %", 100 * (c.score / best.score - 1));
    if (tile != best_tile)
      c.reason +=
          fmt::format(": {} waves of its tiles, each as {:.0f} of depth, against {} as {:.0f}", waves(problem, tile),
                      depth_of_tile(problem, tile), waves(problem, best_tile), depth_of_tile(problem, best_tile));
    const double reads = cost_of_order(problem, tile, c.band), least = cost_of_order(problem, best_tile, best.band);
    if (reads != least)
      c.reason += fmt::format("{} its order's reads cost {:.1f} %, against {:.1f}", tile != best_tile ? ";" : ":",
                              100 * (reads - 1), 100 * (least - 1));
  }
  return all;
}

namespace {

/// Why no fused kernel can run the call; empty if one can.
std::string obstacle_to_fusing(const Factor& a, const Factor& b, const ProgramInfo& program) {
  if (a.depth == 0) return "there is nothing to multiply";
  std::string reason = obstacle("a", a);
  if (reason.empty()) reason = obstacle("b", b);
  for (const Operand& operand : program.operands)
    if (reason.empty()) reason = obstacle(operand);
  return reason;
}

}  // namespace

Plan choose(const Problem& problem, const HopperKernels& kernels, std::string_view card, const TunedPlans& tuned) {
  if (const TunedPlan* entry = tuned.find(card, kernels.name, problem.form, problem.shape))
    for (const HopperKernel& kernel : kernels.products)
      if (kernel.form == problem.form && kernel.tile == entry->tile)
        return {.kernel = &kernel, .band = entry->band, .tuned = true};
  return untuned(problem, kernels);
}

Plan choose(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels,
            int multiprocessors, std::string_view card, const TunedPlans& tuned) {
  std::string reason = obstacle_to_fusing(a, b, program);
  if (!reason.empty()) return {.reason = std::move(reason)};
  Plan plan = choose(problem_of(a, b, program, multiprocessors), kernels, card, tuned);
  if (plan.kernel == nullptr) plan.reason = "a reduction of the program is wider than every tile";
  return plan;
}

Plan choose(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels) {
  static const TunedPlans none;
  return choose(a, b, program, kernels, kMultiprocessors, {}, none);
}

}  // namespace coda::hopper
