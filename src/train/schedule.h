// The learning rate of a step.
#pragma once
#include <cstdint>

namespace coda::train {

/// A linear rise over the first `warmup` steps; then lr for good, or half a cosine down to min_lr at the end of the run.
struct Schedule {
  enum class Kind { constant, cosine };
  Kind kind = Kind::constant;
  double lr = 1e-3;
  double min_lr = 0;
  int64_t warmup = 0;
  int64_t steps = 1;  // of the whole run; only the cosine needs it

  /// step counts from 0, and step warmup - 1 is the first at the full rate.
  double at(int64_t step) const;
};

}  // namespace coda::train
