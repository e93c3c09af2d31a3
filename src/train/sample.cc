#include "sample.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "coda/error.h"
#include "random.h"

namespace coda::train {
namespace {

/// uniform is in [0, 1).
int32_t choose(std::span<const float> logits, double temperature, double uniform) {
  const auto likeliest = std::ranges::max_element(logits);
  if (temperature == 0) return static_cast<int32_t>(likeliest - logits.begin());
  std::vector<double> cumulative;
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp((static_cast<double>(logit) - static_cast<double>(*likeliest)) / temperature);
    cumulative.push_back(sum);
  }
  const auto chosen = std::ranges::upper_bound(cumulative, uniform * sum);
  return static_cast<int32_t>(std::min(chosen - cumulative.begin(), std::ssize(cumulative) - 1));
}

/// Bytes of the valid UTF-8 sequence of a visible character that text begins with, or 0.
size_t visible_length(std::span<const unsigned char> text) {
  const unsigned char lead = text[0];
  if (lead == '\n' || lead == '\t' || (lead >= 0x20 && lead < 0x7f)) return 1;
  const size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                        : lead >= 0xe0 && lead < 0xf0 ? 3
                        : lead >= 0xf0 && lead < 0xf5 ? 4
                                                      : 0;
  if (length == 0 || length > text.size()) return 0;
  uint32_t code = lead & (0x7fu >> length);
  for (const unsigned char next : text.subspan(1, length - 1)) {
    if ((next & 0xc0) != 0x80) return 0;
    code = code << 6 | (next & 0x3fu);
  }
  const bool overlong = code < (length == 2 ? 0x80u : length == 3 ? 0x800u : 0x10000u);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool control = code < 0xa0;  // C1: some terminals act on them
  return overlong || surrogate || control || code > 0x10ffff ? 0 : length;
}

}  // namespace

std::vector<int32_t> sample(llama::Model& model, std::span<const int32_t> prompt, const SampleOptions& options) {
  const llama::Config& config = model.config();
  if (prompt.empty()) throw UsageError("--prompt is empty; it needs at least one token to go on from");
  for (const int32_t token : prompt) {
    if (token < 0 || token >= config.vocab) {
      throw UsageError(fmt::format("--prompt has token {}, but the vocabulary is {}", token, config.vocab));
    }
  }
  if (options.length < 0) throw UsageError(fmt::format("--length is {}; it needs at least 0", options.length));
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw UsageError(fmt::format("--temperature is {}; it needs a finite number of at least 0", options.temperature));
  }
  if (options.context < 0) throw UsageError(fmt::format("--context is {}; it needs at least 0", options.context));
  const int64_t context = options.context == 0 ? config.max_positions : std::min(options.context, config.max_positions);

  std::vector<int32_t> tokens(prompt.begin(), prompt.end());
  const auto latest = [&](int64_t count) {
    return std::span<const int32_t>(tokens).last(static_cast<size_t>(std::min(count, std::ssize(tokens))));
  };
  std::optional<llama::Decoder> decoder;
  int64_t fed = 0;
  for (int64_t i = 0; i < options.length; ++i) {
    // A full context starts again from its later half.
    const bool anew = !decoder || fed == context;
    if (anew) decoder.emplace(model);
    const std::span<const int32_t> next = latest(!anew ? 1 : fed == 0 ? context : std::max<int64_t>(1, context / 2));
    fed = (anew ? 0 : fed) + std::ssize(next);
    const std::span<const float> logits = decoder->feed(next);
    const uint64_t random = mix(mix(options.seed) + static_cast<uint64_t>(i));
    tokens.push_back(choose(logits, options.temperature, static_cast<double>(random >> 11) * 0x1p-53));
  }
  tokens.erase(tokens.begin(), tokens.begin() + std::ssize(prompt));
  return tokens;
}

std::string printable(std::span<const int32_t> bytes) {
  std::vector<unsigned char> text(bytes.begin(), bytes.end());
  std::string out;
  for (std::span<const unsigned char> rest = text; !rest.empty();) {
    const size_t length = visible_length(rest);
    if (length == 0) {
      out += fmt::format("\\x{:02x}", rest[0]);
      rest = rest.subspan(1);
    } else {
      out.append(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(length));
      rest = rest.subspan(length);
    }
  }
  return out;
}

}  // namespace coda::train
