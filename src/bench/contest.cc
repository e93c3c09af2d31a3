#include "contest.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

namespace coda::bench {

namespace {

using Clock = std::chrono::steady_clock;
// OpenBLAS' workers spin for 2^26 cycles.
constexpr auto kRest = std::chrono::milliseconds(40);

double seconds(const std::function<void()>& run, int64_t times) {
  const auto start = Clock::now();
  for (int64_t i = 0; i < times; ++i) run();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Time time_of(std::vector<double> rounds) {
  const auto [low, high] = std::ranges::minmax(rounds);
  return {median(rounds), low, high, std::move(rounds)};
}

std::vector<Time> measure(const std::vector<Entry>& entries, const Rounds& rounds) {
  std::vector<std::vector<double>> taken(entries.size());
  std::vector<size_t> order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(1);
  for (int round = 0; round < rounds.count; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      std::this_thread::sleep_for(kRest);
      const double once = seconds(entries[i].run, 1);
      const auto times = std::max<int64_t>(1, std::llround(rounds.seconds / std::max(once, 1e-7)));
      taken[i].push_back(seconds(entries[i].run, times) / static_cast<double>(times));
    }
  }
  std::vector<Time> result;
  result.reserve(taken.size());
  for (auto& times : taken) result.push_back(time_of(std::move(times)));
  return result;
}

double ratio(const Time& a, const Time& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.rounds.size(); ++i) ratios.push_back(a.rounds[i] / b.rounds[i]);
  return median(std::move(ratios));
}

}  // namespace coda::bench
