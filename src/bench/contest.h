// Times of things that do the same, taken in turns, so that what the machine does besides falls on all of them alike.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace coda::bench {

struct Entry {
  std::string name;
  std::function<void()> run;
};

/// Seconds of one run.
struct Time {
  double median, low, high;    // over the rounds
  std::vector<double> rounds;  // of each
};

double median(std::vector<double> values);
/// Of what each round took.
Time time_of(std::vector<double> rounds);

/// The median over the rounds of a's time over b's in the same round: what slows the whole machine for a while falls on both.
double ratio(const Time& a, const Time& b);

struct Rounds {
  int count = 7;
  double seconds = 0.05;  // of one measurement: as many runs as fit, at least one
};

/// One time for each entry, in their order. In every round each runs once to warm up, then for rounds.seconds, in random order, after
/// a rest that lets the threads of a library that spin after their work fall asleep.
std::vector<Time> measure(const std::vector<Entry>& entries, const Rounds& rounds);

}  // namespace coda::bench
