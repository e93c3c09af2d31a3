#include "tuning.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "coda/error.h"
#include "train/durable_file.h"

namespace coda::bench {

namespace {

using Json = nlohmann::ordered_json;

// Medians of the same plan differ by about a third of this between runs.
constexpr double kLeastGain = 1.003;
constexpr double kMeanBar = 1.03;

std::string shape_of(const GpuCase& product) {
  return fmt::format("{}, {}, {} {}", product.m, product.n, product.k, name(product.row->form));
}

coda::detail::Form form_of(Form form) {
  return form == Form::TN ? coda::detail::Form::TN : form == Form::NN ? coda::detail::Form::NN : coda::detail::Form::NT;
}

std::string short_text(const hopper::TunedPlan& plan) {
  return fmt::format("{}, {}", hopper::name(plan.tile), plan.band);
}

Json json_of(const PlanTime& measured) {
  return {{"tile", hopper::name(measured.plan.tile)},
          {"band", measured.plan.band},
          {"median_s", measured.time.median},
          {"low_s", measured.time.low},
          {"high_s", measured.time.high},
          {"rounds_s", measured.time.rounds}};
}

/// The only one of all processes that has it, for as long as it lives. A file of its own: the other one is replaced.
class Lock {
 public:
  explicit Lock(const std::filesystem::path& path)
      : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) throw FileError(path.string(), "cannot be created: " + train::errno_message(errno));
    int locked = 0;
    do locked = ::flock(descriptor_, LOCK_EX);
    while (locked != 0 && errno == EINTR);
    if (locked == 0) return;
    const int error = errno;
    ::close(descriptor_);
    throw FileError(path.string(), "cannot be locked: " + train::errno_message(error));
  }
  ~Lock() { ::close(descriptor_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int descriptor_;
};

}  // namespace

double TuneResult::gain() const {
  return best == 0 ? 1 : ratio(untuned().time, winner().time);
}

size_t winner_of(std::span<const PlanTime> plans) {
  const auto best = std::ranges::min_element(plans, {}, [](const PlanTime& p) { return p.time.median; });
  std::vector<double> gains;
  for (size_t i = 0; i < best->time.rounds.size(); ++i)
    gains.push_back(plans.front().time.rounds[i] / best->time.rounds[i]);
  std::ranges::sort(gains);
  return gains[gains.size() / 4] >= kLeastGain ? static_cast<size_t>(best - plans.begin()) : 0;
}

hopper::TunedEntry entry_of(const TuneResult& result, const std::string& card) {
  return {.card = card,
          .program = result.program,
          .form = form_of(result.product.row->form),
          .shape = {result.product.m, result.product.n, result.product.k},
          .plan = result.winner().plan};
}

double mean_gain(const TuneReport& report) {
  double sum = 0;
  int count = 0;
  for (const TuneResult& result : report.results) {
    if (!result.failure.empty()) continue;
    sum += std::log(result.gain());
    ++count;
  }
  return count > 0 ? std::exp(sum / count) : std::numeric_limits<double>::quiet_NaN();
}

std::string tune_table_head(const TuneReport& report) {
  return fmt::format(
      "{}, driver {}; launches back to back, every plan in random order, medians of {} rounds of the nearest; times in "
      "ms\n"
      "{:29} {:>26} {:>5}  {:32} {:>9}  {:32} {:>9} {:>6}\n",
      report.card, report.driver, report.options.rounds, "program", "M, N, K", "plans", "untuned", "", "best", "",
      "ratio");
}

std::string text_of(const TuneResult& result) {
  const std::string begin = fmt::format("{:29} {:>26} ", result.product.row->program, shape_of(result.product));
  if (!result.failure.empty()) return begin + result.failure + "\n";
  return begin + fmt::format("{:5}  {:32} {:9.4f}  {:32} {:9.4f} {:6.3f}\n", result.plans.size() + result.others.size(),
                             short_text(result.untuned().plan), 1e3 * result.untuned().time.median,
                             result.best == 0 ? "the same" : short_text(result.winner().plan),
                             1e3 * result.winner().time.median, result.gain());
}

std::string tune_summary(const TuneReport& report) {
  const double mean = mean_gain(report);
  if (std::isnan(mean)) return "";
  const auto won =
      std::ranges::count_if(report.results, [](const TuneResult& r) { return r.failure.empty() && r.best != 0; });
  const auto largest = std::ranges::max_element(report.results, {},
                                                [](const TuneResult& r) { return r.failure.empty() ? r.gain() : 0; });
  return fmt::format(
      "\nuntuned ÷ tuned: {:.4f}, geometric mean of {} products (bar {:.2f}: {}); another plan won {} times, by {:.1f} "
      "% at most\n",
      mean, std::ranges::count_if(report.results, [](const TuneResult& r) { return r.failure.empty(); }), kMeanBar,
      mean <= kMeanBar ? "met" : "over", won, 100 * (largest->gain() - 1));
}

std::string json_of(const TuneReport& report) {
  Json json = {{"gpu", report.card},
               {"driver", report.driver},
               {"hidden", report.options.hidden},
               {"tokens", report.options.tokens},
               {"rounds", report.options.rounds},
               {"results", Json::array()}};
  for (const TuneResult& result : report.results) {
    Json entry = {
        {"row", result.product.row->name}, {"program", result.program}, {"form", name(result.product.row->form)},
        {"m", result.product.m},           {"n", result.product.n},     {"k", result.product.k}};
    if (!result.failure.empty()) {
      entry["failure"] = result.failure;
    } else {
      entry["untuned_to_best"] = result.gain();
      entry["best"] = result.best;
      for (const PlanTime& plan : result.plans) entry["plans"].push_back(json_of(plan));
      entry["others"] = Json::array();
      for (const PlanTime& plan : result.others) entry["others"].push_back(json_of(plan));
    }
    json["results"].push_back(std::move(entry));
  }
  if (const double mean = mean_gain(report); !std::isnan(mean)) json["untuned_to_best"] = mean;
  return json.dump(2) + "\n";
}

void record_plans(const std::filesystem::path& path, std::span<const hopper::TunedEntry> entries) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  if (error) throw FileError(path.parent_path().string(), "cannot be created: " + error.message());
  const Lock lock(path.string() + ".lock");
  hopper::TunedPlans plans = hopper::load_plans(path);
  for (const hopper::TunedEntry& entry : entries) plans.put(entry);
  train::replace_file(path, plans.json());
}

}  // namespace coda::bench
