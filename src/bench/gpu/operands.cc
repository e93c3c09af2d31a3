#include "operands.h"

#include <string>

#include "coda/rotary.h"

namespace coda::bench {

namespace {

constexpr int64_t kHead = 128;

std::vector<float> around(float mean, float spread, int64_t size, std::mt19937_64& random) {
  std::uniform_real_distribution<float> uniform(mean - spread, mean + spread);
  std::vector<float> values(static_cast<size_t>(size));
  for (float& x : values) x = uniform(random);
  return values;
}

/// Of the pairs of q, k and v side by side, as wide as each other.
std::vector<float> turns_of(bool high, int64_t pairs) {
  const std::vector<float> radians = rotary_frequencies(kHead, kHead, 1e4);
  const RotaryTurns turns = to_turns(radians);
  const std::vector<float>& head = high ? turns.high : turns.low;
  std::vector<float> values(static_cast<size_t>(pairs), 0.f);
  for (size_t i = 0; i < values.size() / 3 * 2; ++i) values[i] = head[i % head.size()];
  return values;
}

}  // namespace

std::vector<float> real_values(std::string_view name, int64_t size, int64_t n, std::mt19937_64& random) {
  if (name == "inv_rms" || name == "gamma") return around(1, 0.2f, size, random);
  if (name == "mean_dot") return around(0, 0.1f, size, random);
  if (name == "turns_high") return turns_of(true, size);
  if (name == "turns_low") return turns_of(false, size);
  // Of logits of variance 1.
  if (name == "log_sum_exp") return around(std::log(static_cast<float>(n)) + 0.5f, 0.1f, size, random);
  if (name == "d_log_sum_exp") return around(1, 0, size, random);
  if (name == "d_label_logit") return around(-1, 0, size, random);
  throw Error("coda bench has no values for the operand " + std::string(name));
}

std::vector<int32_t> index_values(std::string_view name, int64_t size, int64_t n, std::mt19937_64& random) {
  constexpr int64_t kDocument = 8192;
  std::vector<int32_t> values(static_cast<size_t>(size));
  std::uniform_int_distribution<int32_t> column(0, static_cast<int32_t>(n - 1));
  for (int64_t i = 0; i < size; ++i) {
    if (name == "position")
      values[static_cast<size_t>(i)] = static_cast<int32_t>(i % kDocument);
    else if (name == "label")
      values[static_cast<size_t>(i)] = column(random);
    else
      throw Error("coda bench has no values for the operand " + std::string(name));
  }
  return values;
}

}  // namespace coda::bench
