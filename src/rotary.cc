#include "coda/rotary.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

namespace coda {

void check(const RotaryHead& head) {
  if (head.width <= 0 || head.width % 16 != 0)
    throw UsageError(fmt::format("a head is {} wide; rotary positions need a multiple of 16", head.width));
  if (head.rotary < 0 || head.rotary > head.width || head.rotary % 16 != 0)
    throw UsageError(fmt::format("the rotary width is {}; it needs to be a multiple of 16, at most the head's {}",
                                 head.rotary, head.width));
}

std::vector<float> rotary_frequencies(int64_t width, int64_t rotary, double theta) {
  check(RotaryHead{.width = width, .rotary = rotary});
  if (!(theta > 0)) throw UsageError(fmt::format("theta is {}; it needs to be positive", theta));
  std::vector<float> radians(static_cast<size_t>(width / 2));
  for (int64_t i = 0; i < rotary / 2; ++i)
    radians[static_cast<size_t>(i)] =
        static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary)));
  return radians;
}

RotaryTurns to_turns(std::span<const float> radians) {
  RotaryTurns turns;
  for (const float frequency : radians) {
    const double exact = static_cast<double>(frequency) / (2 * std::numbers::pi);
    turns.high.push_back(static_cast<float>(exact));
    turns.low.push_back(static_cast<float>(exact - static_cast<double>(turns.high.back())));
  }
  return turns;
}

int64_t packed_rotary_row(int64_t i, const RotaryHead& head) {
  if (i >= head.rotary) return i;
  const int64_t half = head.rotary / 2;
  return head.layout == RotaryLayout::half_split ? packed_row(i % half, i >= half) : packed_row(i / 2, i % 2 == 1);
}

}  // namespace coda
