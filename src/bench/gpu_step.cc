#include "gpu_step.h"

namespace coda::bench {

double step_flops(const llama::Config& c, int64_t rows, int64_t seq) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double layer = real(c.hidden) * (real(c.qkv_width()) + real(c.query_width()) + 3 * real(c.ffn));
  const double weights = real(c.layers) * layer + real(c.vocab) * real(c.hidden);
  const double attention = real(c.layers) * 12 * real(c.query_width()) * real(seq) / 2;
  return real(rows) * real(seq) * (6 * weights + attention);
}

}  // namespace coda::bench
