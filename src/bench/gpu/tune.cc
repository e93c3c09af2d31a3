#include <algorithm>
#include <numeric>

#include "bench/tuning.h"
#include "coda/error.h"
#include "device.h"
#include "each_case.h"
#include "nvml.h"
#include "race.h"
#include "stopwatch.h"
#include "subject.h"

namespace coda::bench {

namespace {

// Rounds that tell who may be near the best, at the clock of all.
constexpr double kFirstMeasurement = 0.004;  // seconds
constexpr int kFirstRounds = 3;
constexpr double kNear = 1.1;  // of the best's time in those rounds
constexpr size_t kMostNear = 5;

std::vector<PlanTime> times_of(const std::vector<hopper::TunedPlan>& plans, const GpuRegime& regime) {
  std::vector<PlanTime> times;
  for (size_t i = 0; i < plans.size(); ++i) times.push_back({plans[i], regime[i].time});
  return times;
}

class Tuning {
 public:
  Tuning(const GpuOptions& options, Gpu& gpu, Stopwatch& stopwatch, RandomOperands& random)
      : options_(options), gpu_(gpu), stopwatch_(stopwatch), random_(random) {}

  TuneResult run(const GpuCase& product) {
    const std::vector<Factors> factors = make_factors(product, random_);
    const std::unique_ptr<Subject> subject = make_subject(gpu_, product, factors, random_);
    TuneResult result{.product = product, .program = std::string(subject->kernels().name)};
    std::vector<hopper::TunedPlan> plans;
    std::vector<Contestant> contestants;
    for (const hopper::Candidate& c : hopper::candidates(subject->problem(), subject->kernels())) {
      plans.push_back({c.kernel->tile, c.band});
      const hopper::Plan plan{.kernel = c.kernel, .band = c.band};
      contestants.push_back({hopper::text_of(c.kernel->tile, c.band),
                             [subject = subject.get(), plan](int set) { subject->launch(set, plan); }});
    }
    const Launch& untuned = contestants.front().launch;
    warm(stopwatch_, contestants, launches_of(stopwatch_, untuned, kFirstMeasurement), options_.warm_seconds);
    std::vector<PlanTime> first = first_times(plans, contestants);
    if (first.size() == 1) {
      result.plans = std::move(first);
      return result;
    }

    // The untuned plan, and the nearest to the best.
    std::vector<size_t> order(plans.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::sort(order, {}, [&](size_t i) { return first[i].time.median; });
    std::vector<hopper::TunedPlan> near{plans[0]};
    std::vector<Contestant> finalists{contestants[0]};
    const double best = first[order[0]].time.median;
    for (const size_t i : order) {
      if (i == 0) continue;
      if (finalists.size() > kMostNear || first[i].time.median > kNear * best) {
        result.others.push_back(std::move(first[i]));
        continue;
      }
      near.push_back(plans[i]);
      finalists.push_back(contestants[i]);
    }
    result.plans = times_of(
        near, settled_race(stopwatch_, finalists, finalists.front().launch, options_.rounds, random_.generator()));
    result.best = winner_of(result.plans);
    return result;
  }

 private:
  std::vector<PlanTime> first_times(const std::vector<hopper::TunedPlan>& plans,
                                    const std::vector<Contestant>& contestants) {
    const int launches = launches_of(stopwatch_, contestants.front().launch, kFirstMeasurement);
    return times_of(
        plans, race(contestants, kFirstRounds, random_.generator(),
                    [&](const Launch& launch, int /*round*/) { return stopwatch_.back_to_back(launch, launches); }));
  }

  const GpuOptions& options_;
  Gpu& gpu_;
  Stopwatch& stopwatch_;
  RandomOperands& random_;
};

}  // namespace

TuneReport tune_gpu(const GpuOptions& options, const std::function<void(const TuneReport&)>& progress) {
  const std::vector<GpuCase> cases = gpu_cases(options);
  { const Gpu usable; }  // says what is wrong with the GPU before anything else does
  const Stream stream;
  Gpu gpu(stream.get());
  const Nvml nvml(gpu.device());
  Stopwatch stopwatch(stream, nvml);
  RandomOperands random;
  Tuning tuning(options, gpu, stopwatch, random);
  TuneReport report{.card = gpu.name(), .driver = nvml.driver(), .options = options, .results = {}};
  for_each_case(cases, report, progress, [&](const GpuCase& product) { return tuning.run(product); });
  return report;
}

}  // namespace coda::bench
