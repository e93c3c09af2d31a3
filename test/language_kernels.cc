#include "coda/cpu/lanes.h"
#include "coda/programs/rope.h"
#include "coda/vjp.h"
#include "language_lanes.h"

namespace coda::test {

namespace {

using Isa = isa::CODA_ISA;
using V = cpu::Lanes<Isa>;

struct Silu {
  template <class T>
  CODA_FN T operator()(T x) const {
    return silu(x);
  }
};
struct Tanh {
  template <class T>
  CODA_FN T operator()(T x) const {
    return tanh(x);
  }
};

V value(Function f, V x) {
  switch (f) {
    case Function::exp:
      return exp(x);
    case Function::log:
      return log(x);
    case Function::sqrt:
      return sqrt(x);
    case Function::tanh:
      return tanh(x);
    case Function::erf:
      return erf(x);
    case Function::rint:
      return rint(x);
    case Function::abs:
      return abs(x);
    case Function::sigmoid:
      return sigmoid(x);
    case Function::silu:
      return silu(x);
    case Function::d_silu:
      return vjp(Silu{}, x, 1.f);
    case Function::d_tanh:
      return vjp(Tanh{}, x, 1.f);
    case Function::cos:
      return cos_sin_turns(x).first;
    case Function::sin:
      return cos_sin_turns(x).second;
    case Function::round_to_bf16:
      return rounded<bf16>(x);
  }
  return x;
}
V value(Function3 f, V a, V b, V c) {
  switch (f) {
    case Function3::fma:
      return fma(a, b, c);
    case Function3::min:
      return min(a, b);
    case Function3::max:
      return max(a, b);
    case Function3::select_less:
      return select(a < b, c, 0.f);
    case Function3::add:
      return a + b;
    case Function3::subtract:
      return a - b;
    case Function3::multiply:
      return a * b;
    case Function3::divide:
      return a / b;
    case Function3::rotation_cos:
      return rotation<V>(a, b, c).first;
    case Function3::rotation_sin:
      return rotation<V>(a, b, c).second;
  }
  return a;
}

/// body(first, count) for steps of one register.
template <class Body>
void steps(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += V::width) body(i, static_cast<int>(n - i < V::width ? n - i : V::width));
}

}  // namespace

template <class AnyIsa>
void OnLanes<AnyIsa>::apply(Function f, const float* x, float* y, int64_t n) {
  steps(n, [&](int64_t i, int k) { cpu::store<Isa>(y + i, value(f, cpu::load<Isa>(x + i, k)), k); });
}
template <class AnyIsa>
void OnLanes<AnyIsa>::apply(Function3 f, const float* a, const float* b, const float* c, float* y, int64_t n) {
  steps(n, [&](int64_t i, int k) {
    cpu::store<Isa>(y + i, value(f, cpu::load<Isa>(a + i, k), cpu::load<Isa>(b + i, k), cpu::load<Isa>(c + i, k)), k);
  });
}
template <class AnyIsa>
void OnLanes<AnyIsa>::load(const bf16* x, float* y, int64_t n) {
  steps(n, [&](int64_t i, int k) { cpu::store<Isa>(y + i, cpu::load<Isa>(x + i, k), k); });
}
template <class AnyIsa>
void OnLanes<AnyIsa>::store(const float* x, bf16* y, int64_t n) {
  steps(n, [&](int64_t i, int k) { cpu::store<Isa>(y + i, cpu::load<Isa>(x + i, k), k); });
}

template struct OnLanes<Isa>;

}  // namespace coda::test
