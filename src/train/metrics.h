// metrics.jsonl: what every step of a run came to, one JSON object a line.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace coda::train {

struct StepMetrics {
  int64_t step = 0;         // from 0
  double loss = 0;          // mean over the step's targets, before the update
  double grad_norm = 0;     // before clipping
  double tokens_per_s = 0;  // by the wall clock, from reading the data to the optimizer and logging
  double lr = 0;
  std::optional<double> valid_loss;  // after the update, at the steps that evaluate
};

/// The file, and its contents in memory for the picture.
class MetricsLog {
 public:
  /// Keeps the lines of the steps before `step` and cuts the rest: what a run wrote after its last checkpoint, and a last line
  /// that a crash tore. Makes the file if there is none. Throws FileError, and cuts nothing, if the lines before `step` are
  /// damaged: they are on the disk before a checkpoint is.
  MetricsLog(const std::string& path, int64_t step);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void append(const StepMetrics& metrics);
  /// Returns once all lines are on the disk.
  void sync();

  const std::vector<StepMetrics>& steps() const { return steps_; }

 private:
  /// Takes the lines of the steps before `step`; returns the bytes that they have.
  int64_t read_lines(int64_t step);

  std::string path_;
  int file_ = -1;
  std::vector<StepMetrics> steps_;
};

}  // namespace coda::train
