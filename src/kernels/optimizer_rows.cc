#include "llama/optimizer_rows.h"

#include "coda/cpu/lanes.h"

namespace coda::llama {

using cpu::Lanes;
using cpu::load;
using cpu::store;

namespace {

/// body(first element, how many) over n elements, one register at a time.
template <class Isa, class Body>
CODA_FN void for_lanes(int64_t n, Body&& body) {
  constexpr int width = Lanes<Isa>::width;
  int64_t i = 0;
  for (; i + width <= n; i += width) body(i, width);
  if (i < n) body(i, static_cast<int>(n - i));
}

}  // namespace

template <class Isa>
void unfold_row(const float* folded, const float* weight, const float* gamma, bool add, float* gradient, float* d_gamma,
                int64_t n) {
  for_lanes<Isa>(
      n, [&](int64_t i, int count) __attribute__((always_inline)) {
        const Lanes<Isa> d = load<Isa>(folded + i, count);
        Lanes<Isa> g = d * load<Isa>(gamma + i, count);
        if (add) g = g + load<Isa>(static_cast<const float*>(gradient) + i, count);
        store<Isa>(d_gamma + i,
                   load<Isa>(static_cast<const float*>(d_gamma) + i, count) + d * load<Isa>(weight + i, count), count);
        store<Isa>(gradient + i, g, count);
      });
}

template <class Isa>
double sum_of_squares(const float* x, int64_t n) {
  constexpr int64_t kGroup = 1024;
  double total = 0;
  for (int64_t first = 0; first < n; first += kGroup) {
    const int64_t size = n - first < kGroup ? n - first : kGroup;
    Lanes<Isa> group = 0.f;
    for_lanes<Isa>(
        size, [&](int64_t i, int count) __attribute__((always_inline)) {
          const Lanes<Isa> value = load<Isa>(x + first + i, count);
          group = group + value * value;
        });
    total += static_cast<double>(cpu::sum<Isa>(group));
  }
  return total;
}

template <class Isa>
void adamw_row(float* p, float* m, float* v, const float* gradient, int64_t n, const AdamWStep& step) {
  const Lanes<Isa> beta1 = step.beta1, beta2 = step.beta2, rest1 = 1.f - step.beta1, rest2 = 1.f - step.beta2;
  for_lanes<Isa>(
      n, [&](int64_t i, int count) __attribute__((always_inline)) {
        const Lanes<Isa> g = load<Isa>(gradient + i, count) * step.gradient_scale;
        const Lanes<Isa> first = beta1 * load<Isa>(static_cast<const float*>(m) + i, count) + rest1 * g;
        const Lanes<Isa> second = beta2 * load<Isa>(static_cast<const float*>(v) + i, count) + rest2 * (g * g);
        const Lanes<Isa> kept = load<Isa>(static_cast<const float*>(p) + i, count) * step.decay;
        store<Isa>(m + i, first, count);
        store<Isa>(v + i, second, count);
        store<Isa>(p + i, kept - step.step_size * (first / (sqrt(second) * step.inv_sqrt_correction + step.eps)),
                   count);
      });
}

template <class Isa, class E>
void fold_row(const float* weight, const float* gamma, E* out, int64_t n) {
  for_lanes<Isa>(
      n, [&](int64_t i, int count) __attribute__((always_inline)) {
        Lanes<Isa> w = load<Isa>(weight + i, count);
        if (gamma != nullptr) w = w * load<Isa>(gamma + i, count);
        store<Isa>(out + i, w, count);
      });
}

template void unfold_row<isa::CODA_ISA>(const float*, const float*, const float*, bool, float*, float*, int64_t);
template double sum_of_squares<isa::CODA_ISA>(const float*, int64_t);
template void adamw_row<isa::CODA_ISA>(float*, float*, float*, const float*, int64_t, const AdamWStep&);
template void fold_row<isa::CODA_ISA, float>(const float*, const float*, float*, int64_t);
template void fold_row<isa::CODA_ISA, bf16>(const float*, const float*, bf16*, int64_t);

}  // namespace coda::llama
