// What an epilogue program is made of: operand kinds, and the two sides from which one struct is seen.
//
//   template <class S = Tensors<bf16>>
//   struct Residual {
//     In <S, Tile<>>             residual;  // [M, N]
//     Out<S, Tile<>>             h;         // [M, N]
//     Out<S, RowSum<float, 128>> sum_sq;    // [N/128, M]
//     CODA_FN void operator()(Real<S> acc) { h = acc + residual; sum_sq = h * h; }
//   };
//
// S = Tensors<E>: the caller's side, fields are views of tensors, E is the element type of activations.
// S = Registers<V, E>: where the mathematics runs; fields are values, V is T or Pair<T>.
#pragma once
#include <cstddef>

#include "coda/math.h"

namespace coda {

// ---- operand kinds --------------------------------------------------------------------------------------------------
// M rows and N columns are the accumulator's. A call operator that takes a Pair sees N/2 pairs of columns in packed order:
// the first of a pair in columns 16k…16k+7, its partner in 16k+8…16k+15.

/// Stands for the element type of activations, E of Tensors<E>.
struct Activation {};

template <class T>
struct PerRow {};  // [M]: one value per row, float or int32_t
template <class T>
struct PerCol {};  // [N]: one value per column; a pair of them for a pair
template <class T>
struct PerPair {};  // [P], P divides N/2 and 8 divides P: one value per pair, periodic
template <class T>
struct Scalar {};  // a value
template <class T>
struct DeviceScalar {};  // a pointer to a value that the engine reads when it runs

template <class T = Activation>
struct Tile {};  // [M, N]
template <class T = Activation>
struct HalfTile {};  // [M, N/2]: one value per pair
template <class T = Activation>
struct DoubleTile {};  // [M, 2N]: a pair, in packed order, per accumulator column
template <class T>
struct Accumulate {};  // [M, N]: out += value

// Partial reductions, one slot per Width columns (Height rows) whatever the plan, combined in a fixed order; a second stage
// combines the slots. They see the value before it is rounded. Of a pair both values count. As an In field a partial gives
// the value of its slot.
template <class T, int Width>
struct RowSum {};  // [⌈N/Width⌉, M]
template <class T, int Width>
struct RowMax {};  // [⌈N/Width⌉, M]
template <class T, int Height>
struct ColSum {};  // [⌈M/Height⌉, N]
template <int Width = 128>
struct RowLogSumExp {};  // [⌈N/Width⌉, M] of MaxSum

/// The running state of a log-sum-exp: log Σ exp(v) = max + log(sum).
struct MaxSum {
  float max, sum;  // sum of exp(v - max)
};

/// The kind of a field that an option has switched off: it holds nothing, and what is assigned to it is dropped.
struct Off {};

/// Kind where Switch::value is true, otherwise Off.
template <class Switch, class Kind>
using When = std::conditional_t<Switch::value, Kind, Off>;

// ---- values ---------------------------------------------------------------------------------------------------------

struct Nothing {
  template <class U>
  CODA_FN constexpr Nothing& operator=(const U&) {
    return *this;
  }
};

/// A field of a kind that has no value for this accumulator; the engine refuses the program before it is used.
struct Unavailable {};

/// What a reduction takes for one accumulator or pair. Combine is how a pair's two values become one.
template <class T, class Combine>
struct Contribution {
  T value;
  CODA_FN Contribution& operator=(T x) {
    value = x;
    return *this;
  }
  CODA_FN Contribution& operator=(Pair<T> x) {
    value = Combine{}(x.first, x.second);
    return *this;
  }
};
struct Sum {
  template <class T>
  CODA_FN T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  CODA_FN T operator()(T a, T b) const {
    return max(a, b);
  }
};

namespace detail {

template <class V>
struct RealOf {
  using type = V;
};
template <class T>
struct RealOf<Pair<T>> {
  using type = T;
};

template <class T, class Real>
struct StoredAs {  // how an element of type T is seen by the mathematics
  using type = Real;
};
template <class Real>
struct StoredAs<int32_t, Real> {
  using type = Index<Real>;
};

template <class T, class E>
using element_t = std::conditional_t<std::is_same_v<T, Activation>, E, T>;

/// In<Registers<V>, K> and Out<Registers<V>, K>. Unavailable where the kind has no value for V.
template <class K, class V>
struct ValueOf {
  using in = Unavailable;
  using out = Unavailable;
  static_assert(!std::is_void_v<K>);
};
template <class Read, class Write = Unavailable>
struct Values {
  using in = Read;
  using out = Write;
};
template <class T, class V>
struct ValueOf<PerRow<T>, V> : Values<typename StoredAs<T, typename RealOf<V>::type>::type> {};
template <class T, class V>
struct ValueOf<PerCol<T>, V> : Values<V> {};
template <class T, class R>
struct ValueOf<PerPair<T>, Pair<R>> : Values<R> {};
template <class T, class V>
struct ValueOf<Scalar<T>, V> : Values<typename RealOf<V>::type> {};
template <class T, class V>
struct ValueOf<DeviceScalar<T>, V> : Values<typename RealOf<V>::type> {};
template <class T, class V>
struct ValueOf<Tile<T>, V> : Values<V, V> {};
template <class T, class R>
struct ValueOf<HalfTile<T>, Pair<R>> : Values<R, R> {};
template <class T, class V>
struct ValueOf<DoubleTile<T>, V> : Values<Pair<V>, Pair<V>> {};
template <class T, class R>
struct ValueOf<DoubleTile<T>, Pair<R>> : Values<Unavailable> {};
template <class T, class V>
struct ValueOf<Accumulate<T>, V> : Values<Unavailable, V> {};
template <class T, int W, class V>
struct ValueOf<RowSum<T, W>, V> : Values<typename RealOf<V>::type, Contribution<typename RealOf<V>::type, Sum>> {};
template <class T, int W, class V>
struct ValueOf<RowMax<T, W>, V> : Values<typename RealOf<V>::type, Contribution<typename RealOf<V>::type, Max>> {};
template <class T, int H, class V>
struct ValueOf<ColSum<T, H>, V> : Values<Unavailable, V> {};
template <int W, class V>
struct ValueOf<RowLogSumExp<W>, V> : Values<Unavailable, V> {};
template <class V>
struct ValueOf<Off, V> : Values<Nothing, Nothing> {};

/// In<Tensors<E>, K> and Out<Tensors<E>, K>: what the caller fills in.
template <class K, class E>
struct ViewOf;
template <class Read, class Write>
struct Views {
  using in = Read;
  using out = Write;
};
template <class T, class E>
struct ViewOf<PerRow<T>, E> : Views<Vector<const T>, Vector<T>> {};
template <class T, class E>
struct ViewOf<PerCol<T>, E> : Views<Vector<const T>, Vector<T>> {};
template <class T, class E>
struct ViewOf<PerPair<T>, E> : Views<Vector<const T>, Vector<T>> {};
template <class T, class E>
struct ViewOf<Scalar<T>, E> : Views<T, T> {};
template <class T, class E>
struct ViewOf<DeviceScalar<T>, E> : Views<const T*, T*> {};
template <class T, class E>
struct ViewOf<Tile<T>, E> : Views<Matrix<const element_t<T, E>>, Matrix<element_t<T, E>>> {};
template <class T, class E>
struct ViewOf<HalfTile<T>, E> : ViewOf<Tile<T>, E> {};
template <class T, class E>
struct ViewOf<DoubleTile<T>, E> : ViewOf<Tile<T>, E> {};
template <class T, class E>
struct ViewOf<Accumulate<T>, E> : ViewOf<Tile<T>, E> {};
template <class T, int W, class E>
struct ViewOf<RowSum<T, W>, E> : ViewOf<Tile<T>, E> {};
template <class T, int W, class E>
struct ViewOf<RowMax<T, W>, E> : ViewOf<Tile<T>, E> {};
template <class T, int H, class E>
struct ViewOf<ColSum<T, H>, E> : ViewOf<Tile<T>, E> {};
template <int W, class E>
struct ViewOf<RowLogSumExp<W>, E> : ViewOf<Tile<MaxSum>, E> {};
template <class E>
struct ViewOf<Off, E> : Views<Nothing, Nothing> {};

}  // namespace detail

// ---- the sides ------------------------------------------------------------------------------------------------------

enum class Direction { in, out, local };

/// The side of the engine's bookkeeping: fields are their own types.
struct Fields {
  template <Direction D, class K, int Pass>
  struct Field {
    static constexpr Direction direction = D;
    static constexpr int pass = Pass;
    using Kind = K;
  };
  template <class K>
  using In = Field<Direction::in, K, 0>;
  template <class K>
  using Out = Field<Direction::out, K, 0>;
  template <class K, int Pass>
  using Local = Field<Direction::local, K, Pass>;
  using Real = float;
  using Element = float;
};

/// The caller's side. E: float or bf16.
template <class E>
struct Tensors {
  template <class K>
  using In = typename detail::ViewOf<K, E>::in;
  template <class K>
  using Out = typename detail::ViewOf<K, E>::out;
  template <class K, int Pass>
  using Local = Nothing;
  using Real = float;
  using Element = E;
};

/// The inside of the call operator.
template <class V, class E>
struct Registers {
  template <class K>
  using In = const typename detail::ValueOf<K, V>::in;
  template <class K>
  using Out = typename detail::ValueOf<K, V>::out;
  template <class K, int Pass>
  using Local = In<K>;
  using Real = typename detail::RealOf<V>::type;
  using Element = E;
};

/// The inside of measure(Pass<P>, …): the locals of this pass are written, those of earlier ones are read, Out fields drop
/// what they are given.
template <class V, class E, int P>
struct Measuring {
  template <class K>
  using In = const typename detail::ValueOf<K, V>::in;
  template <class K>
  using Out = Nothing;
  template <class K, int LocalPass>
  using Local =
      std::conditional_t<(LocalPass < P), In<K>,
                         std::conditional_t<LocalPass == P, typename detail::ValueOf<K, V>::out, Unavailable>>;
  using Real = typename detail::RealOf<V>::type;
  using Element = E;
};

// ---- what a program writes down -------------------------------------------------------------------------------------

template <class S, class K>
using In = typename S::template In<K>;
template <class S, class K>
using Out = typename S::template Out<K>;
/// A reduction over a group of Width columns of a row (RowSum, RowMax) that measure() fills and a later pass reads.
template <class S, class K, int Pass = 0>
using Local = typename S::template Local<K, Pass>;
/// The accumulator's type.
template <class S>
using Real = typename S::Real;
/// The element type of activations.
template <class S>
using Element = typename S::Element;

/// Where the accumulator stands; of a pair, its first.
template <class S>
struct At {
  Index<Real<S>> row, col;
};

/// Names one of several measure() passes: void measure(Pass<0>, Real<S> acc); void measure(Pass<1>, Real<S> acc); …
template <int P>
struct Pass {};

// clang-format off
CODA_FN float round_to_float(float v) { return v; }
CODA_FN float round_to_bf16(float v) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, 0f00000000;" : "=r"(word) : "f"(v));  // v in the upper half
  return std::bit_cast<float>(word);
#else
  return float(bf16(v));
#endif
}
CODA_FN double round_to_float(double v) { return double(float(v)); }
// Through float: that is what an fp32 epilogue rounds.
CODA_FN double round_to_bf16(double v) { return double(float(bf16(float(v)))); }
// clang-format on

/// v as it will be stored in an E, for reductions that must agree with what a later kernel reads.
template <class E, class T>
CODA_FN T rounded(T v) {
  if constexpr (std::is_same_v<E, float>)
    return round_to_float(v);
  else
    return round_to_bf16(v);
}

}  // namespace coda
