#include "schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace coda::train {

double Schedule::at(int64_t step) const {
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (kind == Kind::constant) return lr;
  const double length = static_cast<double>(std::max<int64_t>(1, steps - warmup));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / length);
  return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace coda::train
