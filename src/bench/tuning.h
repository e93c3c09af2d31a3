// coda bench --tune: every plan of a fused product measured, and the best one kept for later processes. What is here needs no GPU:
// who wins, what is printed, and writing the file. bench/gpu/tune.cc measures.
#pragma once
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench/gpu.h"
#include "hopper/plan_cache.h"

namespace coda::bench {

/// Puts entries among those of the file, in one step: a reader finds the old file or the new one, and of processes that do this at
/// once none loses what another put there. A file that is damaged or not one of ours is replaced. Makes the folder. Throws
/// FileError.
void record_plans(const std::filesystem::path& path, std::span<const hopper::TunedEntry> entries);

/// How long launches took by one plan, back to back.
struct PlanTime {
  hopper::TunedPlan plan;
  Time time;
};

/// One product, by every legal plan.
struct TuneResult {
  GpuCase product{};
  std::string program{};  // as CODA_HOPPER_PROGRAM spells it: what plans are kept under
  std::string failure{};  // why it was not measured; otherwise empty
  std::vector<PlanTime>
      plans{};  // the first is the one that is chosen untuned; then those that came near the best in the first rounds
  std::vector<PlanTime> others{};  // of fewer rounds
  size_t best = 0;                 // among plans

  const PlanTime& untuned() const { return plans.front(); }
  const PlanTime& winner() const { return plans[best]; }
  /// The untuned plan's time over the winner's: median of the rounds' own ratios; 1 where it won itself.
  double gain() const;
};

/// The one of the least median, if in three of four rounds it takes at least 0.3 % less than the first, which otherwise stays.
size_t winner_of(std::span<const PlanTime> plans);

/// What is kept of a result, for a card.
hopper::TunedEntry entry_of(const TuneResult& result, const std::string& card);

struct TuneReport {
  std::string card, driver;
  GpuOptions options;
  std::vector<TuneResult> results;
};
/// Geometric mean of the untuned plans' times over the winners', of what was measured; NaN of nothing.
double mean_gain(const TuneReport& report);

std::string tune_table_head(const TuneReport& report);
std::string text_of(const TuneResult& result);
/// The mean beside the bar for plans that nobody tuned; empty if nothing was measured.
std::string tune_summary(const TuneReport& report);
std::string json_of(const TuneReport& report);

/// Measures every product that options name. progress sees the report when the card is known, and after each product. Throws
/// DeviceError where there is no Hopper GPU. Defined in the GPU half: null where it is not linked in.
[[gnu::weak]] TuneReport tune_gpu(const GpuOptions& options, const std::function<void(const TuneReport&)>& progress);

}  // namespace coda::bench
