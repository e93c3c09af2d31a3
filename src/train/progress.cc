#include "progress.h"

#include <fmt/format.h>

#include <cmath>

namespace coda::train {
namespace {

constexpr auto kTerminalInterval = std::chrono::milliseconds(100);
constexpr auto kPlainInterval = std::chrono::seconds(10);

}  // namespace

std::string duration(double seconds) {
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

void Progress::start(int64_t step, int64_t steps) {
  first_ = step;
  steps_ = steps;
  start_ = Clock::now();
}

void Progress::step(const StepMetrics& metrics) {
  const auto now = Clock::now();
  const int64_t done = metrics.step + 1;
  const bool first = metrics.step == first_;
  // The first step is slow, it meets everything for the first time: it counts only until there is another.
  rate_ = metrics.step <= first_ + 1 ? metrics.tokens_per_s : 0.9 * rate_ + 0.1 * metrics.tokens_per_s;

  const bool due =
      first || done == steps_ || now - shown_ >= (terminal_ ? Clock::duration(kTerminalInterval) : kPlainInterval);
  if (!due && !metrics.valid_loss) return;
  shown_ = now;

  // From all that the run's steps took, validation and saving too.
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left = elapsed / static_cast<double>(done - first_) * static_cast<double>(steps_ - done);
  const std::string line =
      fmt::format("step {:>{}}/{}  loss {:.4f}{}  {:.0f} tokens/s  {} left", done, fmt::formatted_size("{}", steps_),
                  steps_, metrics.loss, metrics.valid_loss ? fmt::format("  valid {:.4f}", *metrics.valid_loss) : "",
                  rate_, duration(left));
  if (terminal_ && !metrics.valid_loss) {
    out_ << "\r" << line << "\x1b[K" << std::flush;
    line_open_ = true;
  } else {
    note(line);
  }
}

void Progress::note(const std::string& line) {
  if (line_open_) out_ << "\r\x1b[K";
  line_open_ = false;
  out_ << line << std::endl;
}

}  // namespace coda::train
