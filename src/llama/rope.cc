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
  std::vector<float> frequencies = coda::rotary_frequencies(config.head_dim, config.head_dim, config.rope_theta);
  for (float& frequency : frequencies) {
    double f = static_cast<double>(frequency);
    if (config.rope.kind == RopeScaling::Kind::linear) f /= config.rope.factor;
    if (config.rope.kind == RopeScaling::Kind::llama3) f = llama3_stretched(f, config.rope);
    frequency = static_cast<float>(f);
  }
  return frequencies;
}

RotaryTurns rotary_turns(const Config& config) {
  const std::vector<float> frequencies = rotary_frequencies(config);
  std::vector<float> radians;
  for (int64_t pair = 0; pair < config.qkv_width() / 2; ++pair) {
    const bool rotates = 2 * pair < config.query_width() + config.kv_width();
    radians.push_back(rotates ? frequencies[static_cast<size_t>(pair) % frequencies.size()] : 0.f);
  }
  return to_turns(radians);
}

}  // namespace coda::llama
