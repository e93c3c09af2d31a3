#include "race.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace coda::bench {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int kSets = 2;  // of operands, which take turns
}  // namespace

int launches_of(Stopwatch& stopwatch, const Launch& launch, double seconds) {
  const double once = stopwatch.back_to_back(launch, kSets).seconds;
  return kSets * std::max(2, static_cast<int>(std::ceil(seconds / kSets / once)));
}

void warm(Stopwatch& stopwatch, const std::vector<Contestant>& contestants, int launches, double seconds) {
  const auto start = Clock::now();
  while (std::chrono::duration<double>(Clock::now() - start).count() < seconds)
    for (const Contestant& contestant : contestants) stopwatch.back_to_back(contestant.launch, launches);
}

GpuRegime race(const std::vector<Contestant>& contestants, int rounds, std::mt19937_64& random, const Read& read) {
  GpuRegime regime;
  regime.reserve(contestants.size());
  for (const Contestant& contestant : contestants) regime.push_back({.name = contestant.name});
  std::vector<std::vector<double>> seconds(contestants.size());
  std::vector<size_t> order(contestants.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (int round = 0; round < rounds; ++round) {
    std::ranges::shuffle(order, random);
    for (const size_t i : order) {
      const Stopwatch::Reading reading = read(contestants[i].launch, round);
      seconds[i].push_back(reading.seconds);
      regime[i].mhz.push_back(reading.card.mhz);
      regime[i].watts.push_back(reading.card.watts);
    }
  }
  for (size_t i = 0; i < regime.size(); ++i) regime[i].time = time_of(std::move(seconds[i]));
  return regime;
}

GpuRegime settled_race(Stopwatch& stopwatch, const std::vector<Contestant>& contestants, const Launch& one, int rounds,
                       std::mt19937_64& random) {
  const int before = launches_of(stopwatch, one, kSettling), launches = launches_of(stopwatch, one, kSustained);
  return race(contestants, rounds, random, [&](const Launch& launch, int /*round*/) {
    stopwatch.back_to_back(launch, before);
    return stopwatch.back_to_back(launch, launches);
  });
}

}  // namespace coda::bench
