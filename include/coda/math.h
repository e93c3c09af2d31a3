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

#if defined(__CUDACC__)
// On the device float has functions of its own where those of the standard library are slow (a square root or a
// quotient in single steps, sines of any angle through local memory) or lose a NaN. std::log, tanh and erf are used as
// they are: 1 or 2 units in the last place, in registers.
/// 2^(x·log2 e), the product rounded: off by 2 units in the last place and |x| of them more, 2 instructions where expf has 8.
CODA_FN float exp(float x) {
#if defined(__CUDA_ARCH__)
  float y = 1.4426950408889634f * x;
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
  return y;
#else
  return std::exp(x);
#endif
}
CODA_FN float sqrt(float x) {
#if defined(__CUDA_ARCH__)
  asm("sqrt.approx.f32 %0, %0;" : "+f"(x));  // 1 unit in the last place
  return x;
#else
  return std::sqrt(x);
#endif
}
CODA_FN float min(float a, float b) {
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return b < a ? b : a;
#endif
}
CODA_FN float max(float a, float b) {
#if defined(__CUDA_ARCH__)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return a < b ? b : a;
#endif
}
#endif

/// (cos, sin) of 2π·turns, |turns| <= 1/2.
template <Scalar_ T>
CODA_FN Pair<T> cos_sin_turns(T turns) {
  const T angle = T(6.283185307179586476925) * turns;
  return {std::cos(angle), std::sin(angle)};
}

#if defined(__CUDACC__)
/// Absolute error 4e-7 on the device: sixteen bits, where a bf16 keeps eight.
CODA_FN Pair<float> cos_sin_turns(float turns) {
  const float angle = 6.283185307f * turns;
#if defined(__CUDA_ARCH__)
  return {__cosf(angle), __sinf(angle)};
#else
  return {std::cos(angle), std::sin(angle)};
#endif
}
#endif

/// 1 / (1 + e^-x).
template <class T>
CODA_FN T sigmoid(T x) {
  return 1.f / (1.f + exp(-x));
}
#if defined(__CUDACC__)
CODA_FN float sigmoid(float x) {
  float y = 1.f + exp(-x);
#if defined(__CUDA_ARCH__)
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(y));  // 1 unit in the last place
  return y;
#else
  return 1.f / y;
#endif
}
#endif

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

/// The approximation of that paper, x/2 · (1 + tanh u) with u = sqrt(2/π)·(x + 0.044715·x³). (1 + tanh u)/2 =
/// sigmoid(2u), which loses no bits for large negative x.
template <class T>
CODA_FN T gelu_tanh(T x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

}  // namespace coda
