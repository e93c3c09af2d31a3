// A number that knows how far fp32 arithmetic may have strayed from it: running error analysis.
//
// The oracle runs a program on these to learn, element by element, what an engine that computes in float may deviate by.
// The bounds grow from what the operation rounds, so that a tolerance never has to be guessed, or widened until a test passes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "coda/operands.h"

namespace coda::verify {

/// Half a unit in the last place of a float, relative.
inline constexpr double kFloatRounding = 0x1p-24;
/// Below this a float loses bits, or is flushed to zero.
inline constexpr double kUnderflow = 0x1p-126;
/// What exp, log, tanh and erf of the engine's lanes may be off by, relative; language_test measures it.
inline constexpr double kFunctionError = 4 * kFloatRounding;
/// The same of cos_sin_turns, absolute.
inline constexpr double kRotationError = 4 * kFloatRounding;

/// What is assumed of an engine's arithmetic where IEEE 754 does not say it.
struct Arithmetic {
  double function;  // relative error of exp, log, tanh and erf
  double exponent;  // of exp, besides, for each unit of its argument
  double division;  // relative error
  double rotation;  // absolute error of cos_sin_turns
  bool truncates;   // products are summed by tensor cores, which cut off what they cannot hold (truncated_sum_error)
};
/// The CPU engine's lanes.
inline constexpr Arithmetic kLanes = {.function = kFunctionError,
                                      .exponent = 0,
                                      .division = kFloatRounding,
                                      .rotation = kRotationError,
                                      .truncates = false};
/// A Hopper GPU. Its exp may be ex2.approx (2 units) of the rounded product of the argument and the rounded log2 e; log, tanh and
/// erf are held to what CUDA's logf, tanhf and erff promise (2 units), which the .approx instructions do not; division is
/// -prec-div=false's (2 units); sin.approx and cos.approx are off by 2^-20.5, and their angle is rounded before.
inline constexpr Arithmetic kHopperArithmetic = {.function = 4 * kFloatRounding,
                                                 .exponent = 1.25 * kFloatRounding,
                                                 .division = 4 * kFloatRounding,
                                                 .rotation = 16 * kFloatRounding,
                                                 .truncates = true};

/// What Bounded assumes now.
inline Arithmetic assumed = kLanes;
/// For as long as it lives, Bounded assumes this arithmetic.
class Assume {
 public:
  explicit Assume(const Arithmetic& arithmetic) : before_(assumed) { assumed = arithmetic; }
  ~Assume() { assumed = before_; }
  Assume(const Assume&) = delete;
  Assume& operator=(const Assume&) = delete;

 private:
  Arithmetic before_;
};

/// What the sum over k of a[k]·b[k] is off by where wgmma makes it: 16 products at a time, in ascending order. Assumed of a step:
/// its products are exact; they and the sum so far are cut to two bits below the last place of the largest of them, and what they
/// add up to is cut to a float. Nothing is rounded to nearest, so errors add up and do not cancel.
inline double truncated_sum_error(const double* a, const double* b, int64_t k) {
  constexpr int64_t kStep = 16;
  double sum = 0, error = 0;
  for (int64_t begin = 0; begin < k; begin += kStep) {
    double largest = std::fabs(sum);
    for (int64_t d = begin; d < std::min(begin + kStep, k); ++d) {
      const double term = a[d] * b[d];
      largest = std::max(largest, std::fabs(term));
      sum += term;
    }
    error += static_cast<double>(kStep + 1) * 0x1p-25 * largest + 2 * kFloatRounding * std::fabs(sum);
  }
  return error;
}

/// Which of two values is less, and whether a float computation is bound to find the same.
struct Compared {
  bool value, sure;

  explicit operator bool() const { return value; }
  friend Compared operator!(Compared a) { return {!a.value, a.sure}; }
  friend Compared operator&(Compared a, Compared b) { return {a.value && b.value, a.sure && b.sure}; }
  friend Compared operator|(Compared a, Compared b) { return {a.value || b.value, a.sure && b.sure}; }
};

struct Bounded {
  double value;
  double error;  // |what a float computation has here - value| is at most this

  Bounded() = default;
  template <class U>
  requires std::is_arithmetic_v<U> Bounded(U x) : value(static_cast<double>(x)), error(0) {}
  Bounded(double value_, double error_) : value(value_), error(error_) {}

  friend Bounded operator-(Bounded a) { return {-a.value, a.error}; }
  // Of the operands, not of the result: sums of many terms are taken in another order by an engine.
  friend Bounded operator+(Bounded a, Bounded b) {
    const double sum = a.value + b.value;
    if (std::isinf(sum)) return {sum, 0};
    return {sum, a.error + b.error + kFloatRounding * (std::fabs(a.value) + std::fabs(b.value))};
  }
  friend Bounded operator-(Bounded a, Bounded b) { return a + -b; }
  friend Bounded operator*(Bounded a, Bounded b) {
    const double product = a.value * b.value;
    return {product, std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error +
                         kFloatRounding * std::fabs(product) + kUnderflow};
  }
  friend Bounded operator/(Bounded a, Bounded b) {
    const double ratio = a.value / b.value;
    return {ratio, (a.error + std::fabs(ratio) * b.error) / (std::fabs(b.value) - b.error) +
                       assumed.division * std::fabs(ratio) + kUnderflow};
  }
  friend Compared operator<(Bounded a, Bounded b) { return {a.value < b.value, apart(a, b)}; }
  friend Compared operator>(Bounded a, Bounded b) { return {a.value > b.value, apart(a, b)}; }
  friend Compared operator<=(Bounded a, Bounded b) { return {a.value <= b.value, apart(a, b)}; }
  friend Compared operator>=(Bounded a, Bounded b) { return {a.value >= b.value, apart(a, b)}; }
  /// Exact ones are, equal or not.
  static bool apart(Bounded a, Bounded b) {
    const double errors = a.error + b.error;
    return !(errors > 0) || std::fabs(a.value - b.value) > errors;
  }

  /// f(x), computed with a relative error of assumed.function, where |f'| is at most slope.
  Bounded function(double f, double slope) const { return {f, slope * error + assumed.function * std::fabs(f)}; }

  friend Bounded exp(Bounded x) {
    const double y = std::exp(x.value);
    // Past 128 the result has left the range of floats, and 0 times infinity is no bound.
    const double relative = assumed.function + assumed.exponent * std::min(std::fabs(x.value), 128.0);
    return {y, y * std::expm1(x.error) + relative * y + kUnderflow};
  }
  friend Bounded log(Bounded x) { return x.function(std::log(x.value), 1 / (x.value - x.error)); }
  friend Bounded sqrt(Bounded x) {
    const double y = std::sqrt(x.value);
    return {y, (y > 0 ? x.error / y : std::sqrt(x.error)) + kFloatRounding * y};
  }
  friend Bounded tanh(Bounded x) { return x.function(std::tanh(x.value), 1); }
  friend Bounded erf(Bounded x) { return x.function(std::erf(x.value), 1.1283791670955126); }
  // A program takes rint to reduce an angle: whichever of two neighbours it is, the angle is the same.
  friend Bounded rint(Bounded x) { return {std::rint(x.value), 0}; }
  friend Bounded abs(Bounded x) { return {std::fabs(x.value), x.error}; }
  friend Bounded fma(Bounded a, Bounded b, Bounded c) {
    const double sum = a.value * b.value + c.value;
    return {sum, std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error + c.error +
                     kFloatRounding * std::fabs(sum)};
  }
  friend Bounded min(Bounded a, Bounded b) { return {std::min(a.value, b.value), std::max(a.error, b.error)}; }
  friend Bounded max(Bounded a, Bounded b) { return {std::max(a.value, b.value), std::max(a.error, b.error)}; }
  friend Bounded select(bool condition, Bounded a, Bounded b) { return condition ? a : b; }
  // Beside a clamp's limit the one value may be taken or the other.
  friend Bounded select(Compared condition, Bounded a, Bounded b) {
    const Bounded chosen = condition.value ? a : b;
    if (condition.sure) return chosen;
    return {chosen.value, std::fabs(a.value - b.value) + std::max(a.error, b.error)};
  }
  friend Pair<Bounded> cos_sin_turns(Bounded turns) {
    const double angle = 2 * M_PI * turns.value, error = 2 * M_PI * turns.error + assumed.rotation;
    return {{std::cos(angle), error}, {std::sin(angle), error}};
  }
  friend Bounded round_to_float(Bounded x) {
    return {double(float(x.value)), x.error + kFloatRounding * std::fabs(x.value)};
  }
  // A value that strays at all may be rounded to the next bf16 over.
  friend Bounded round_to_bf16(Bounded x) {
    const double rounded = coda::round_to_bf16(x.value);
    return {rounded, x.error + (x.error > 0 ? 2 * half_unit_bf16(std::fabs(rounded) + x.error) : 0)};
  }

  /// Half a unit in the last place of the bf16 values around x.
  static double half_unit_bf16(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 8); }
};

}  // namespace coda::verify

namespace coda {
template <>
struct IndexOf<verify::Bounded> {
  using type = int64_t;
};
}  // namespace coda
