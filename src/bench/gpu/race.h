// Launches that take turns on one GPU, in random order.
#pragma once
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu.h"
#include "stopwatch.h"

namespace coda::bench {

struct Contestant {
  std::string name;
  Launch launch;
};

/// An even number of launches, enough that they take so many seconds between two events.
int launches_of(Stopwatch& stopwatch, const Launch& launch, double seconds);

/// Runs all of them in turns for so many seconds.
void warm(Stopwatch& stopwatch, const std::vector<Contestant>& contestants, int launches, double seconds);

/// How long a contestant is measured at the clock that it brings the card to under its power limit, and how long it runs in front of that.
/// Where contestants take turns faster than the limiter acts each runs at the clock of all of them, and what draws most power looks best.
inline constexpr double kSettling = 0.15, kSustained = 0.1;  // seconds

/// Every contestant once a round, in a random order. read: one measurement.
using Read = std::function<Stopwatch::Reading(const Launch& launch, int round)>;
GpuRegime race(const std::vector<Contestant>& contestants, int rounds, std::mt19937_64& random, const Read& read);

/// A race of launches back to back, each settled. one: of about their length.
GpuRegime settled_race(Stopwatch& stopwatch, const std::vector<Contestant>& contestants, const Launch& one, int rounds,
                       std::mt19937_64& random);

}  // namespace coda::bench
