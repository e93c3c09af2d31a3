// What a person sees of a run while it goes on.
#pragma once
#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>

#include "metrics.h"

namespace coda::train {

/// "4.2 s", "3:07", "2:14:09".
std::string duration(double seconds);

/// On a terminal one line that is written over and over; elsewhere plain lines, the first step's, then one about every ten
/// seconds, the last step's, and those that validated.
class Progress {
 public:
  Progress(std::ostream& out, bool terminal) : out_(out), terminal_(terminal) {}

  /// Time left is judged from here.
  void start(int64_t step, int64_t steps);
  void step(const StepMetrics& metrics);
  /// A line that stays.
  void note(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;

  std::ostream& out_;
  bool terminal_;
  bool line_open_ = false;
  int64_t first_ = 0;
  int64_t steps_ = 0;
  double rate_ = 0;  // tokens/s, a running mean
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_ = Clock::time_point::min();
};

}  // namespace coda::train
