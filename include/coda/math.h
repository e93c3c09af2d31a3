// The mathematics that a program may use. Each function takes a value of any of the types a program runs on: float and
// double (here), a SIMD batch (coda/cpu/lanes.h), a dual number (coda/vjp.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "coda/pair.h"

namespace coda {

/// The integer that stands beside a value of type T: rows, columns, labels and positions. A batch has its own.
template <class T>
struct IndexOf {
  using type = int32_t;
};
template <>
struct IndexOf<double> {
  using type = int64_t;
};
template <class T>
using Index = typename IndexOf<T>::type;

template <class T>
concept Scalar_ = std::is_same_v<T, float> || std::is_same_v<T, double>;

// clang-format off
template <Scalar_ T> CODA_FN T exp(T x) { return std::exp(x); }
template <Scalar_ T> CODA_FN T log(T x) { return std::log(x); }
template <Scalar_ T> CODA_FN T sqrt(T x) { return std::sqrt(x); }
template <Scalar_ T> CODA_FN T tanh(T x) { return std::tanh(x); }
template <Scalar_ T> CODA_FN T erf(T x) { return std::erf(x); }
template <Scalar_ T> CODA_FN T rint(T x) { return std::rint(x); }
template <Scalar_ T> CODA_FN T abs(T x) { return std::fabs(x); }
template <Scalar_ T> CODA_FN T fma(T a, T b, std::type_identity_t<T> c) { return std::fma(a, b, c); }
template <Scalar_ T> CODA_FN T min(T a, std::type_identity_t<T> b) { return b < a ? b : a; }
template <Scalar_ T> CODA_FN T max(T a, std::type_identity_t<T> b) { return a < b ? b : a; }
/// condition ? a : b, lane by lane. Programs are branch-free.
template <class T> requires std::is_arithmetic_v<T>
CODA_FN T select(bool condition, T a, std::type_identity_t<T> b) { return condition ? a : b; }
/// An Index<T> as a T; exact below 2^24.
CODA_FN float to_real(int32_t i) { return static_cast<float>(i); }
CODA_FN double to_real(int64_t i) { return static_cast<double>(i); }
// clang-format on

/// (cos, sin) of 2π·turns, |turns| <= 1/2.
template <Scalar_ T>
CODA_FN Pair<T> cos_sin_turns(T turns) {
  const T angle = T(6.283185307179586476925) * turns;
  return {std::cos(angle), std::sin(angle)};
}

/// 1 / (1 + e^-x).
template <class T>
CODA_FN T sigmoid(T x) {
  return 1.f / (1.f + exp(-x));
}

/// x · sigmoid(x).
template <class T>
CODA_FN T silu(T x) {
  return x * sigmoid(x);
}

/// x · Φ(x), Φ the normal distribution's (Hendrycks and Gimpel, arXiv 1606.08415).
template <class T>
CODA_FN T gelu_erf(T x) {
  return 0.5f * x * (1.f + erf(x * 0.70710678118654752f));
}

/// The approximation of that paper, x/2 · (1 + tanh u) with u = sqrt(2/π)·(x + 0.044715·x³). (1 + tanh u)/2 = sigmoid(2u),
/// which loses no bits for large negative x.
template <class T>
CODA_FN T gelu_tanh(T x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

}  // namespace coda
