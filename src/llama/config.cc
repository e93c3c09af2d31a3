#include "config.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include "coda/error.h"

namespace coda::llama {
namespace {

[[noreturn]] void refuse(std::string_view field, const std::string& got, const std::string& needs) {
  throw UsageError(fmt::format("{} is {}; it needs {}", field, got, needs));
}

void check_positive(std::string_view field, int64_t value) {
  if (value < 1) refuse(field, std::to_string(value), "a whole number of at least 1");
}

void check_positive(std::string_view field, double value) {
  if (!(value > 0) || !std::isfinite(value)) refuse(field, fmt::format("{}", value), "a finite number above 0");
  using Float = std::numeric_limits<float>;
  if (value < double{Float::min()} || value > double{Float::max()}) {
    refuse(field, fmt::format("{}", value), "a number from 1.2e-38 to 3.4e38, the range of float");
  }
}

void check_multiple(std::string_view field, int64_t value, int64_t of, std::string_view reason) {
  if (value % of != 0) refuse(field, std::to_string(value), fmt::format("a multiple of {}{}", of, reason));
}

/// Sums of products that turn into nothing, once and for all, as soon as one does not fit.
class Count {
 public:
  Count(int64_t value) : value_(value) {}
  friend Count operator*(Count a, Count b) {
    return combine(a, b, [](int64_t x, int64_t y, int64_t* z) { return __builtin_mul_overflow(x, y, z); });
  }
  friend Count operator+(Count a, Count b) {
    return combine(a, b, [](int64_t x, int64_t y, int64_t* z) { return __builtin_add_overflow(x, y, z); });
  }
  std::optional<int64_t> value() const { return value_; }

 private:
  template <class Operation>
  static Count combine(Count a, Count b, Operation overflows) {
    Count result = 0;
    if (!a.value_ || !b.value_ || overflows(*a.value_, *b.value_, &*result.value_)) result.value_.reset();
    return result;
  }
  std::optional<int64_t> value_;
};

std::optional<int64_t> count_parameters(const Config& c) {
  const Count hidden = c.hidden, query = Count(c.heads) * c.head_dim, kv = Count(c.kv_heads) * c.head_dim;
  const Count attention = hidden * (query + Count(2) * kv) + query * hidden;
  const Count layer = attention + Count(3) * hidden * c.ffn + Count(2) * hidden;
  const Count vocabulary = Count(c.tied ? 1 : 2) * c.vocab * hidden;
  return (vocabulary + c.layers * layer + hidden).value();
}

}  // namespace

int64_t parameter_count(const Config& config) {
  const std::optional<int64_t> count = count_parameters(config);
  if (!count) throw UsageError("the number of parameters is past 2^63; it needs a smaller model");
  return *count;
}

void check(const Config& c) {
  check_positive("vocab", c.vocab);
  check_positive("hidden", c.hidden);
  check_positive("layers", c.layers);
  check_positive("heads", c.heads);
  check_positive("kv_heads", c.kv_heads);
  check_positive("head_dim", c.head_dim);
  check_positive("ffn", c.ffn);
  check_positive("max_positions", c.max_positions);
  check_positive("rms_eps", c.rms_eps);
  check_positive("rope_theta", c.rope_theta);

  if (c.vocab > std::numeric_limits<int32_t>::max()) {
    refuse("vocab", std::to_string(c.vocab), "at most 2147483647, because tokens are 32 bits wide");
  }
  check_multiple("heads", c.heads, c.kv_heads, " (kv_heads)");
  check_multiple("head_dim", c.head_dim, 16, "");
  check_multiple("hidden", c.hidden, 8, "");
  check_multiple("ffn", c.ffn, 8, "");

  if (c.rope.kind != RopeScaling::Kind::none) check_positive("rope.factor", c.rope.factor);
  if (c.rope.kind == RopeScaling::Kind::llama3) {
    check_positive("rope.low_freq_factor", c.rope.low_freq_factor);
    check_positive("rope.high_freq_factor", c.rope.high_freq_factor);
    check_positive("rope.original_max_position_embeddings", c.rope.original_max_position_embeddings);
    // Frequencies in between are interpolated over the difference of the two.
    if (c.rope.high_freq_factor <= c.rope.low_freq_factor) {
      refuse("rope.high_freq_factor", fmt::format("{}", c.rope.high_freq_factor),
             fmt::format("more than rope.low_freq_factor ({})", c.rope.low_freq_factor));
    }
  }

  // Master, gradient and two moments take 16 bytes a parameter, and every offset is an int64_t.
  const std::optional<int64_t> count = count_parameters(c);
  if (!count || *count > std::numeric_limits<int64_t>::max() / 16) {
    throw UsageError("the model is too large to address; it needs fewer than 2^59 parameters");
  }
}

}  // namespace coda::llama
