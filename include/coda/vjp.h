// Derivatives of a program's own function objects, by dual numbers, in registers.
#pragma once
#include "coda/math.h"

namespace coda {

/// A value and its N directional derivatives.
template <class T, int N = 1>
struct Dual {
  T value;
  T slope[N];

  Dual() = default;
  CODA_FN Dual(T value_) : value(value_) {
    for (int i = 0; i < N; ++i) slope[i] = T(0.f);
  }
  template <class U>
  requires(std::is_arithmetic_v<U> && !std::is_same_v<U, T>) CODA_FN Dual(U value_) : Dual(static_cast<T>(value_)) {}
  /// The i-th independent variable.
  CODA_FN static Dual variable(T value, int i) {
    Dual x(value);
    x.slope[i] = T(1.f);
    return x;
  }

  /// An In field is a const Dual, and this overload is the one its assignment finds.
  template <class U>
  CODA_FN void operator=(const U&) const {
    static_assert(detail::always_false<U>, "an In field of an epilogue program is read-only; assign to an Out field");
  }
  template <class U>
  requires std::is_convertible_v<U, Dual> CODA_FN Dual& operator=(const U& other) { return *this = Dual(other); }
  Dual(const Dual&) = default;
  Dual& operator=(const Dual&) = default;

  /// f(x) from its value and derivative at x.value.
  CODA_FN Dual chain(T f, T derivative) const {
    Dual y;
    y.value = f;
    for (int i = 0; i < N; ++i) y.slope[i] = derivative * slope[i];
    return y;
  }

  CODA_FN Dual with_value(T v) const {
    Dual y = *this;
    y.value = v;
    return y;
  }

  friend CODA_FN Dual operator-(Dual a) { return a.chain(-a.value, T(-1.f)); }
  friend CODA_FN Dual operator+(Dual a, Dual b) {
    a.value = a.value + b.value;
    for (int i = 0; i < N; ++i) a.slope[i] = a.slope[i] + b.slope[i];
    return a;
  }
  friend CODA_FN Dual operator-(Dual a, Dual b) {
    a.value = a.value - b.value;
    for (int i = 0; i < N; ++i) a.slope[i] = a.slope[i] - b.slope[i];
    return a;
  }
  friend CODA_FN Dual operator*(Dual a, Dual b) {
    Dual y;
    y.value = a.value * b.value;
    for (int i = 0; i < N; ++i) y.slope[i] = a.slope[i] * b.value + a.value * b.slope[i];
    return y;
  }
  friend CODA_FN Dual operator/(Dual a, Dual b) {
    Dual y;
    const T inverse = T(1.f) / b.value;
    y.value = a.value * inverse;
    for (int i = 0; i < N; ++i) y.slope[i] = (a.slope[i] - y.value * b.slope[i]) * inverse;
    return y;
  }
  friend CODA_FN auto operator<(Dual a, Dual b) { return a.value < b.value; }
  friend CODA_FN auto operator>(Dual a, Dual b) { return a.value > b.value; }
  friend CODA_FN auto operator<=(Dual a, Dual b) { return a.value <= b.value; }
  friend CODA_FN auto operator>=(Dual a, Dual b) { return a.value >= b.value; }

  friend CODA_FN Dual exp(Dual x) {
    const T y = exp(x.value);
    return x.chain(y, y);
  }
  friend CODA_FN Dual log(Dual x) { return x.chain(log(x.value), T(1.f) / x.value); }
  friend CODA_FN Dual sqrt(Dual x) {
    const T y = sqrt(x.value);
    return x.chain(y, T(0.5f) / y);
  }
  friend CODA_FN Dual tanh(Dual x) {
    const T y = tanh(x.value);
    return x.chain(y, T(1.f) - y * y);
  }
  friend CODA_FN Dual erf(Dual x) {
    return x.chain(erf(x.value), T(1.1283791670955126) * exp(-(x.value * x.value)));  // 2/sqrt(pi)
  }
  friend CODA_FN Dual rint(Dual x) { return Dual(rint(x.value)); }
  // Rounding to storage is no step of the mathematics: its slope is that of the identity.
  friend CODA_FN Dual round_to_float(Dual x) { return x.with_value(round_to_float(x.value)); }
  friend CODA_FN Dual round_to_bf16(Dual x) { return x.with_value(round_to_bf16(x.value)); }
  friend CODA_FN Dual abs(Dual x) { return select(x.value < T(0.f), -x, x); }
  friend CODA_FN Dual fma(Dual a, Dual b, Dual c) {
    Dual y = a * b + c;
    y.value = fma(a.value, b.value, c.value);
    return y;
  }
  friend CODA_FN Dual min(Dual a, Dual b) { return select(b.value < a.value, b, a); }
  friend CODA_FN Dual max(Dual a, Dual b) { return select(a.value < b.value, b, a); }
  template <class Mask>
  friend CODA_FN Dual select(Mask condition, Dual a, Dual b) {
    Dual y;
    y.value = select(condition, a.value, b.value);
    for (int i = 0; i < N; ++i) y.slope[i] = select(condition, a.slope[i], b.slope[i]);
    return y;
  }
  friend CODA_FN Pair<Dual> cos_sin_turns(Dual turns) {
    const Pair<T> cs = cos_sin_turns(turns.value);
    constexpr double kTwoPi = 6.283185307179586;
    return {turns.chain(cs.first, T(-kTwoPi) * cs.second), turns.chain(cs.second, T(kTwoPi) * cs.first)};
  }
};

template <class T, int N>
struct IndexOf<Dual<T, N>> : IndexOf<T> {};

/// dL/dx for y = f(x) and d_y = dL/dy.
template <class F, class T>
CODA_FN T vjp(F f, T x, std::type_identity_t<T> d_y) {
  return d_y * f(Dual<T, 1>::variable(x, 0)).slope[0];
}

/// dL/d(first, second) for y = f(z), y one value or a pair like d_y.
template <class F, class T>
CODA_FN Pair<T> vjp(F f, Pair<T> z, std::type_identity_t<T> d_y) {
  const auto y = f(Pair<Dual<T, 2>>{Dual<T, 2>::variable(z.first, 0), Dual<T, 2>::variable(z.second, 1)});
  return {d_y * y.slope[0], d_y * y.slope[1]};
}
template <class F, class T>
CODA_FN Pair<T> vjp(F f, Pair<T> z, Pair<T> d_y) {
  const auto y = f(Pair<Dual<T, 2>>{Dual<T, 2>::variable(z.first, 0), Dual<T, 2>::variable(z.second, 1)});
  return {d_y.first * y.first.slope[0] + d_y.second * y.second.slope[0],
          d_y.first * y.first.slope[1] + d_y.second * y.second.slope[1]};
}

/// y = f(x), and dL/dx for d_y = dL/dy.
template <class T, class X>
struct ValueAndGradient {
  T value;
  X gradient;
};

/// Both in one evaluation. A function object whose derivative is cheaper by hand overloads it.
template <class F, class T>
CODA_FN ValueAndGradient<T, T> value_and_vjp(F f, T x, std::type_identity_t<T> d_y) {
  const auto y = f(Dual<T, 1>::variable(x, 0));
  return {y.value, d_y * y.slope[0]};
}
template <class F, class T>
CODA_FN ValueAndGradient<T, Pair<T>> value_and_vjp(F f, Pair<T> z, std::type_identity_t<T> d_y) {
  const auto y = f(Pair<Dual<T, 2>>{Dual<T, 2>::variable(z.first, 0), Dual<T, 2>::variable(z.second, 1)});
  return {y.value, {d_y * y.slope[0], d_y * y.slope[1]}};
}

}  // namespace coda
