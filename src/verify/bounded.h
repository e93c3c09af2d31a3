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
                       kFloatRounding * std::fabs(ratio) + kUnderflow};
  }
  friend bool operator<(Bounded a, Bounded b) { return a.value < b.value; }
  friend bool operator>(Bounded a, Bounded b) { return a.value > b.value; }
  friend bool operator<=(Bounded a, Bounded b) { return a.value <= b.value; }
  friend bool operator>=(Bounded a, Bounded b) { return a.value >= b.value; }

  /// f(x), computed with a relative error of kFunctionError, where |f'| is at most slope.
  Bounded function(double f, double slope) const { return {f, slope * error + kFunctionError * std::fabs(f)}; }

  friend Bounded exp(Bounded x) {
    const double y = std::exp(x.value);
    return {y, y * std::expm1(x.error) + kFunctionError * y + kUnderflow};
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
  friend Pair<Bounded> cos_sin_turns(Bounded turns) {
    const double angle = 2 * M_PI * turns.value, error = 2 * M_PI * turns.error + kRotationError;
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
