// The values that a program runs on in the CPU engine: a SIMD register of floats, with its integers and masks.
//
// Every type carries the instruction set in its name: the same source is compiled once per set, and two copies of one
// function under one name would let the linker pick the wrong one.
#pragma once
#include <cstring>
#include <limits>
#include <xsimd/xsimd.hpp>

#include "coda/isa.h"
#include "coda/operands.h"

namespace coda {

namespace cpu {

template <class Isa>
struct Arch;
template <>
struct Arch<isa::generic> {
  using type = xsimd::sse2;
};
#if defined(__AVX2__)
template <>
struct Arch<isa::avx2> {
  using type = xsimd::fma3<xsimd::avx2>;
};
#endif
#if defined(__AVX512F__)
template <>
struct Arch<isa::avx512> {
  using type = xsimd::avx512bw;
};
#endif

template <class Isa>
using FloatBatch = xsimd::batch<float, typename Arch<Isa>::type>;
template <class Isa>
using IntBatch = xsimd::batch<int32_t, typename Arch<Isa>::type>;

template <class Batch>
CODA_FN Batch fused_multiply_add(Batch a, Batch b, Batch c) {
  return xsimd::fma(a, b, c);
}
#if defined(__AVX512F__)
/// xsimd 8's own of 16 floats rounds twice.
CODA_FN FloatBatch<isa::avx512> fused_multiply_add(FloatBatch<isa::avx512> a, FloatBatch<isa::avx512> b,
                                                   FloatBatch<isa::avx512> c) {
  return _mm512_fmadd_ps(a, b, c);
}
#endif

template <class Isa>
struct Mask {
  typename FloatBatch<Isa>::batch_bool_type v;
  friend CODA_FN Mask operator&(Mask a, Mask b) { return {a.v && b.v}; }
  friend CODA_FN Mask operator|(Mask a, Mask b) { return {a.v || b.v}; }
  friend CODA_FN Mask operator!(Mask a) { return {!a.v}; }
};

template <class Isa>
struct Lanes;

/// Rows, columns, labels, positions.
template <class Isa>
struct Ints {
  using Batch = IntBatch<Isa>;
  Batch v;

  Ints() = default;
  CODA_FN Ints(Batch b) : v(b) {}
  CODA_FN Ints(int32_t i) : v(i) {}
  template <class U>
  CODA_FN void operator=(const U&) const {
    static_assert(detail::always_false<U>, "an In field of an epilogue program is read-only; assign to an Out field");
  }
  template <class U>
  requires std::is_convertible_v<U, Ints> CODA_FN Ints& operator=(const U& other) { return *this = Ints(other); }
  Ints(const Ints&) = default;
  Ints& operator=(const Ints&) = default;

  friend CODA_FN Ints operator+(Ints a, Ints b) { return a.v + b.v; }
  friend CODA_FN Ints operator-(Ints a, Ints b) { return a.v - b.v; }
  friend CODA_FN Mask<Isa> operator==(Ints a, Ints b) { return {xsimd::bool_cast(a.v == b.v)}; }
  friend CODA_FN Mask<Isa> operator!=(Ints a, Ints b) { return {xsimd::bool_cast(a.v != b.v)}; }
  friend CODA_FN Mask<Isa> operator<(Ints a, Ints b) { return {xsimd::bool_cast(a.v < b.v)}; }
  friend CODA_FN Mask<Isa> operator>=(Ints a, Ints b) { return {xsimd::bool_cast(a.v >= b.v)}; }
};

template <class Isa>
struct Lanes {
  using Batch = FloatBatch<Isa>;
  static constexpr int width = static_cast<int>(Batch::size);
  Batch v;

  Lanes() = default;
  CODA_FN Lanes(Batch b) : v(b) {}
  template <class U>
  requires std::is_arithmetic_v<U> CODA_FN Lanes(U x) : v(static_cast<float>(x)) {}
  template <class U>
  CODA_FN void operator=(const U&) const {
    static_assert(detail::always_false<U>, "an In field of an epilogue program is read-only; assign to an Out field");
  }
  template <class U>
  requires std::is_convertible_v<U, Lanes> CODA_FN Lanes& operator=(const U& other) { return *this = Lanes(other); }
  Lanes(const Lanes&) = default;
  Lanes& operator=(const Lanes&) = default;

  friend CODA_FN Lanes operator-(Lanes a) { return -a.v; }
  friend CODA_FN Lanes operator+(Lanes a, Lanes b) { return a.v + b.v; }
  friend CODA_FN Lanes operator-(Lanes a, Lanes b) { return a.v - b.v; }
  friend CODA_FN Lanes operator*(Lanes a, Lanes b) { return a.v * b.v; }
  friend CODA_FN Lanes operator/(Lanes a, Lanes b) { return a.v / b.v; }
  friend CODA_FN Mask<Isa> operator<(Lanes a, Lanes b) { return {a.v < b.v}; }
  friend CODA_FN Mask<Isa> operator>(Lanes a, Lanes b) { return {a.v > b.v}; }
  friend CODA_FN Mask<Isa> operator<=(Lanes a, Lanes b) { return {a.v <= b.v}; }
  friend CODA_FN Mask<Isa> operator>=(Lanes a, Lanes b) { return {a.v >= b.v}; }

  /// 0 below the smallest normal number, infinite above 2^127.5.
  friend CODA_FN Lanes exp(Lanes x) {
    const Lanes y = select(x < Lanes(-87.33654f), Lanes(0.f), exp_in_range(x));
    return select(x > Lanes(88.376262f), Lanes(std::numeric_limits<float>::infinity()), y);
  }
  /// 1 / (1 + e^-x). What clamping changes is below 2^-126.
  friend CODA_FN Lanes sigmoid(Lanes x) {
    return Lanes(1.f) / (Lanes(1.f) + exp_in_range(min(Lanes(88.f), max(Lanes(-87.f), -x))));
  }
  /// e^x for -87.33 <= x <= 88.37; NaN for NaN. Programs wait for this function, so its chain of operations is kept short: the
  /// polynomial (that of Cephes' expf) is evaluated in Estrin's order.
  friend CODA_FN Lanes exp_in_range(Lanes x) {
    const Lanes shifted = multiply_add(x, Lanes(1.44269504f), Lanes(kWhole));
    const Lanes n = shifted - Lanes(kWhole);
    // ln 2 in two parts, the first so short that n times it is exact.
    const Lanes f = multiply_add(n, Lanes(2.12194440e-4f), multiply_add(n, Lanes(-0.693359375f), x));
    const Lanes f2 = f * f;
    const Lanes p01 = multiply_add(f, Lanes(1.6666665459e-1f), Lanes(5.0000001201e-1f));
    const Lanes p23 = multiply_add(f, Lanes(8.3334519073e-3f), Lanes(4.1665795894e-2f));
    const Lanes p45 = multiply_add(f, Lanes(1.9875691500e-4f), Lanes(1.3981999507e-3f));
    const Lanes p = multiply_add(f2, multiply_add(f2, p45, p23), p01);
    return multiply_add(f2, p, f + Lanes(1.f)) * power_of_two(shifted);
  }
  /// 1.5·2²³: what is added to it is rounded to a whole number, which is then in the lowest bits.
  static constexpr float kWhole = 12582912.f;
  /// 2^n for shifted = n + kWhole, -126 <= n <= 127.
  friend CODA_FN Lanes power_of_two(Lanes shifted) {
    using Int = IntBatch<Isa>;
    return xsimd::bitwise_cast<Batch>((xsimd::bitwise_cast<Int>(shifted.v) << 23) + Int(127 << 23));
  }
  /// a·b + c, in one rounding where there is an instruction for it.
  friend CODA_FN Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
    if constexpr (width > 4)
      return fma(a, b, c);
    else
      return a.v * b.v + c.v;
  }
  friend CODA_FN Lanes log(Lanes x) { return xsimd::log(x.v); }
  friend CODA_FN Lanes sqrt(Lanes x) { return xsimd::sqrt(x.v); }
  friend CODA_FN Lanes tanh(Lanes x) { return xsimd::tanh(x.v); }
  friend CODA_FN Lanes erf(Lanes x) { return xsimd::erf(x.v); }
  friend CODA_FN Lanes rint(Lanes x) { return xsimd::nearbyint(x.v); }
  friend CODA_FN Lanes abs(Lanes x) { return xsimd::abs(x.v); }
  friend CODA_FN Lanes fma(Lanes a, Lanes b, Lanes c) {
    if constexpr (width > 4) {
      return fused_multiply_add(a.v, b.v, c.v);
    } else {
      // Without the instruction: the product is exact in double. Angles at large positions depend on it.
      const __m128d low = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(a.v), _mm_cvtps_pd(b.v)), _mm_cvtps_pd(c.v));
      const __m128d high = _mm_add_pd(_mm_mul_pd(upper(a.v), upper(b.v)), upper(c.v));
      return Batch(_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high)));
    }
  }
  static CODA_FN __m128d upper(__m128 x) { return _mm_cvtps_pd(_mm_movehl_ps(x, x)); }
  friend CODA_FN Lanes min(Lanes a, Lanes b) { return xsimd::min(a.v, b.v); }
  friend CODA_FN Lanes max(Lanes a, Lanes b) { return xsimd::max(a.v, b.v); }
  friend CODA_FN Lanes select(Mask<Isa> condition, Lanes a, Lanes b) { return xsimd::select(condition.v, a.v, b.v); }
  friend CODA_FN Pair<Lanes> cos_sin_turns(Lanes turns) {
    // sin by its odd and cos by its even Taylor-like minimax polynomial on a quarter turn, after the quadrant is taken out.
    const Batch quadrant = xsimd::nearbyint(turns.v * 4.f);
    const Batch a = (turns.v - quadrant * 0.25f) * 6.283185307179586f;  // |a| <= pi/4
    const Batch q = a * a;
    const Batch s = a + a * q * (-1.6666654611e-1f + q * (8.3321608736e-3f + q * -1.9515295891e-4f));
    const Batch c =
        1.f - 0.5f * q + q * q * (4.166664568298827e-2f + q * (-1.388731625493765e-3f + q * 2.443315711809948e-5f));
    const auto odd = xsimd::abs(quadrant) == Batch(1.f);
    const auto half = xsimd::abs(quadrant) == Batch(2.f);
    // quadrant 1: (cos, sin) = (-s, c); -1: (s, -c); ±2: (-c, -s).
    const Batch sign = xsimd::select(quadrant < Batch(0.f), Batch(-1.f), Batch(1.f));
    const Batch cosine = xsimd::select(odd, -sign * s, xsimd::select(half, -c, c));
    const Batch sine = xsimd::select(odd, sign * c, xsimd::select(half, -s, s));
    return {Lanes(cosine), Lanes(sine)};
  }
  friend CODA_FN Lanes round_to_float(Lanes x) { return x; }
  friend CODA_FN Lanes round_to_bf16(Lanes x) {
    const IntBatch<Isa> rounded_bits = bf16_bits(x);
    return xsimd::bitwise_cast<Batch>(rounded_bits & IntBatch<Isa>(static_cast<int32_t>(0xffff0000)));
  }
  /// The float whose upper half is x rounded to bf16; the lower half is not cleared.
  friend CODA_FN IntBatch<Isa> bf16_bits(Lanes x) {
    using Int = IntBatch<Isa>;
    const Int u = xsimd::bitwise_cast<Int>(x.v);
    const Int odd = (u >> 16) & Int(1);
    const Int nearest = u + Int(0x7fff) + odd;
    // A NaN keeps its upper bits and becomes quiet: rounding could carry it into infinity.
    const auto is_nan = xsimd::bool_cast(xsimd::isnan(x.v));  // xsimd's != is false for NaN on AVX
    return xsimd::select(is_nan, u | Int(0x00400000), nearest);
  }
};

template <class Isa>
CODA_FN Lanes<Isa> to_real(Ints<Isa> i) {
  return xsimd::to_float(i.v);
}

/// 0, 1, 2, …
template <class Isa>
CODA_FN Ints<Isa> iota() {
  alignas(64) static constexpr int32_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return IntBatch<Isa>::load_aligned(count);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

template <class Isa>
CODA_FN Lanes<Isa> load(const float* p) {
  return FloatBatch<Isa>::load_unaligned(p);
}
template <class Isa>
CODA_FN Ints<Isa> load(const int32_t* p) {
  return IntBatch<Isa>::load_unaligned(p);
}
template <class Isa>
CODA_FN Lanes<Isa> load(const bf16* p) {
  if constexpr (Lanes<Isa>::width == 4) {
    const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return FloatBatch<Isa>(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half)));
  }
#if defined(__AVX2__)
  if constexpr (Lanes<Isa>::width == 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return FloatBatch<Isa>(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
  }
#endif
#if defined(__AVX512F__)
  if constexpr (Lanes<Isa>::width == 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return FloatBatch<Isa>(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
  }
#endif
}
template <class Isa>
CODA_FN void store(float* p, Lanes<Isa> x) {
  x.v.store_unaligned(p);
}
template <class Isa>
CODA_FN void store(bf16* p, Lanes<Isa> x) {
  const auto bits = bf16_bits(x);
  if constexpr (Lanes<Isa>::width == 4) {
    const __m128i high = _mm_srai_epi32(bits, 16);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(high, high));
  }
#if defined(__AVX2__)
  if constexpr (Lanes<Isa>::width == 8) {
    const __m256i high = _mm256_srai_epi32(bits, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(high, high), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
#endif
#if defined(__AVX512F__)
  if constexpr (Lanes<Isa>::width == 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
#endif
}

/// The first n lanes from memory, zero after them.
template <class Isa, class T>
CODA_FN auto load_some(const T* p, int n) {
  alignas(64) T padded[Lanes<Isa>::width] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load<Isa>(static_cast<const T*>(padded));
}
template <class Isa, class T>
CODA_FN auto load(const T* p, int n) {
  return n == Lanes<Isa>::width ? load<Isa>(p) : load_some<Isa>(p, n);
}
template <class Isa, class T>
CODA_FN void store(T* p, Lanes<Isa> x, int n) {
  if (n == Lanes<Isa>::width) return store<Isa>(p, x);
  alignas(64) T all[Lanes<Isa>::width];
  store<Isa>(all, x);
  for (int i = 0; i < n; ++i) p[i] = all[i];
}

#if defined(__AVX512F__)
/// The lower eight lanes of a, then those of b; the upper ones.
CODA_FN Lanes<isa::avx512> lower_halves(Lanes<isa::avx512> a, Lanes<isa::avx512> b) {
  return {_mm512_shuffle_f32x4(a.v, b.v, 0b01'00'01'00)};
}
CODA_FN Lanes<isa::avx512> upper_halves(Lanes<isa::avx512> a, Lanes<isa::avx512> b) {
  return {_mm512_shuffle_f32x4(a.v, b.v, 0b11'10'11'10)};
}
#endif

// Pairs in packed order: pair p of a row has its first value in column 16(p/8) + p%8 and its partner 8 further on.
CODA_FN constexpr int64_t packed_column(int64_t pair) {
  return pair + (pair & ~int64_t{7});
}

/// n pairs from a row that starts at row, first pair a multiple of the width (or of 8).
template <class Isa, class T>
CODA_FN Pair<Lanes<Isa>> load_pairs(const T* row, int64_t pair, int n) {
  constexpr int width = Lanes<Isa>::width;
  const T* p = row + packed_column(pair);
  if constexpr (width <= 8) {
    return {load<Isa>(p, n), load<Isa>(p + 8, n)};
  } else {
    // Two blocks of eight pairs.
    const auto low = load<Isa>(p), high = n > 8 ? load<Isa>(p + 16) : decltype(low){};
    return {lower_halves(low, high), upper_halves(low, high)};
  }
}
template <class Isa, class T>
CODA_FN void store_pairs(T* row, int64_t pair, Pair<Lanes<Isa>> z, int n) {
  constexpr int width = Lanes<Isa>::width;
  T* p = row + packed_column(pair);
  if constexpr (width <= 8) {
    store<Isa>(p, z.first, n);
    store<Isa>(p + 8, z.second, n);
  } else {
    store<Isa>(p, lower_halves(z.first, z.second));
    if (n > 8) store<Isa>(p + 16, upper_halves(z.first, z.second));
  }
}

/// Lanes [0, n) of x, identity in the others.
template <class Isa>
CODA_FN Lanes<Isa> keep(Lanes<Isa> x, int n, float identity) {
  return n == Lanes<Isa>::width ? x : select(iota<Isa>() < Ints<Isa>(n), x, Lanes<Isa>(identity));
}

template <class Op>
CODA_FN __m128 fold_to_four(__m128 x, Op) {
  return x;
}
#if defined(__AVX2__)
template <class Op>
CODA_FN __m128 fold_to_four(__m256 x, Op op) {
  return op(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#endif
#if defined(__AVX512F__)
template <class Op>
CODA_FN __m128 fold_to_four(__m512 x, Op op) {
  const auto quarter = [x](auto i) { return _mm512_extractf32x4_ps(x, decltype(i)::value); };
  using std::integral_constant;
  return op(op(quarter(integral_constant<int, 0>{}), quarter(integral_constant<int, 2>{})),
            op(quarter(integral_constant<int, 1>{}), quarter(integral_constant<int, 3>{})));
}
#endif

/// op over the lanes: of a lane and the one half a register further on, then of those left, in registers.
template <class Isa, class Op>
CODA_FN float fold(Lanes<Isa> x, Op op) {
  const __m128 four = fold_to_four(x.v, op);
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(op(two, _mm_shuffle_ps(two, two, 1)));
}

/// Sum and maximum over the lanes, in an order that depends on the instruction set only. What a NaN does to a maximum is not said.
template <class Isa>
CODA_FN float sum(Lanes<Isa> x) {
  return fold<Isa>(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
template <class Isa>
CODA_FN float maximum(Lanes<Isa> x) {
  return fold<Isa>(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

}  // namespace cpu

template <class Isa>
struct IndexOf<cpu::Lanes<Isa>> {
  using type = cpu::Ints<Isa>;
};

}  // namespace coda
