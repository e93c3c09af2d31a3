#include "rope.h"

#include <cmath>
#include <numbers>

namespace coda::llama {

namespace {

/// Llama 3's stretch: long waves are divided by factor, short ones kept, with a linear blend between (Hugging Face's
/// _compute_llama3_parameters).
double llama3_stretched(double frequency, const RopeScaling& rope) {
  const double wave = 2 * std::numbers::pi / frequency,
               context = static_cast<double>(rope.original_max_position_embeddings);
  if (wave < context / rope.high_freq_factor) return frequency;
  if (wave > context / rope.low_freq_factor) return frequency / rope.factor;
  const double blend = (context / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - blend) * frequency / rope.factor + blend * frequency;
}

}  // namespace

std::vector<float> rotary_frequencies(const Config& config) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < config.head_dim / 2; ++i) {
    // Rounded to float before it is stretched, as there.
    double f = static_cast<float>(
        std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim)));
    if (config.rope.kind == RopeScaling::Kind::linear) f /= config.rope.factor;
    if (config.rope.kind == RopeScaling::Kind::llama3) f = llama3_stretched(f, config.rope);
    frequencies.push_back(static_cast<float>(f));
  }
  return frequencies;
}

RotaryTurns rotary_turns(const Config& config) {
  const std::vector<float> frequencies = rotary_frequencies(config);
  RotaryTurns turns;
  for (int64_t pair = 0; pair < config.qkv_width() / 2; ++pair) {
    const bool rotates = 2 * pair < config.query_width() + config.kv_width();
    const double radians =
        rotates ? static_cast<double>(frequencies[static_cast<size_t>(pair) % frequencies.size()]) : 0;
    const double exact = radians / (2 * std::numbers::pi);
    turns.high.push_back(static_cast<float>(exact));
    turns.low.push_back(static_cast<float>(exact - static_cast<double>(turns.high.back())));
  }
  return turns;
}

}  // namespace coda::llama
