// Looking at a program: its fields, the accumulator it takes, and whether it is one.
#pragma once
#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>

#include "coda/operands.h"

namespace coda {

enum class ElementType { float32, bfloat16, int32, max_sum };

enum class Kind {
  per_row,
  per_col,
  per_pair,
  scalar,
  device_scalar,
  tile,
  half_tile,
  double_tile,
  accumulate,
  row_sum,
  row_max,
  col_sum,
  row_log_sum_exp,
  off,
  number,  // a plain field
};

/// One field of a program, as describe() tells it.
struct Field {
  std::string_view name;
  Kind kind;
  Direction direction;
  ElementType element;
  int extent;  // columns (rows) of a slot of a partial reduction; otherwise 0
};

namespace detail {

struct ConvertibleToAnything {
  template <class T>
  constexpr operator T() const;
};

template <class A, class... Xs>
constexpr int count_fields() {
  if constexpr (requires { A{Xs{}..., ConvertibleToAnything{}}; })
    return count_fields<A, Xs..., ConvertibleToAnything>();
  else
    return sizeof...(Xs);
}

/// f(field…) with references to the N fields of aggregate a.
template <int N, class A, class F>
CODA_FN constexpr decltype(auto) with_fields(A& a, F&& f) {
  static_assert(N <= 20, "an epilogue program has at most 20 fields");
  // clang-format off
  if constexpr (N == 0) { return f(); }
  else if constexpr (N == 1) { auto& [a0] = a; return f(a0); }
  else if constexpr (N == 2) { auto& [a0, a1] = a; return f(a0, a1); }
  else if constexpr (N == 3) { auto& [a0, a1, a2] = a; return f(a0, a1, a2); }
  else if constexpr (N == 4) { auto& [a0, a1, a2, a3] = a; return f(a0, a1, a2, a3); }
  else if constexpr (N == 5) { auto& [a0, a1, a2, a3, a4] = a; return f(a0, a1, a2, a3, a4); }
  else if constexpr (N == 6) { auto& [a0, a1, a2, a3, a4, a5] = a; return f(a0, a1, a2, a3, a4, a5); }
  else if constexpr (N == 7) { auto& [a0, a1, a2, a3, a4, a5, a6] = a; return f(a0, a1, a2, a3, a4, a5, a6); }
  else if constexpr (N == 8) { auto& [a0, a1, a2, a3, a4, a5, a6, a7] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7); }
  else if constexpr (N == 9) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8); }
  else if constexpr (N == 10) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9); }
  else if constexpr (N == 11) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0); }
  else if constexpr (N == 12) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1); }
  else if constexpr (N == 13) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2); }
  else if constexpr (N == 14) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3); }
  else if constexpr (N == 15) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4); }
  else if constexpr (N == 16) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5); }
  else if constexpr (N == 17) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6); }
  else if constexpr (N == 18) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7); }
  else if constexpr (N == 19) { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8); }
  else { auto& [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9] = a; return f(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9); }
  // clang-format on
}

struct PickField {
  template <int I, class F, class... Rest>
  static CODA_FN constexpr auto& at(F& field, Rest&... rest) {
    if constexpr (I == 0)
      return field;
    else
      return at<I - 1>(rest...);
  }
};

/// The I-th of N fields of a.
template <int N, int I, class A>
CODA_FN constexpr auto& field(A& a) {
  return with_fields<N>(
      a, [](auto&... fields) -> auto& { return PickField::at<I>(fields...); });
}

/// P<Tensors<E>, Options…> taken apart, and the same program on another side.
template <class P>
struct ProgramParts {
  static constexpr bool is_program = false;
};
template <template <class, class...> class P, class E, class... Options>
struct ProgramParts<P<Tensors<E>, Options...>> {
  static constexpr bool is_program = true;
  using Element = E;
  template <class S>
  using On = P<S, Options...>;
};

template <class P, class S>
using on_side = typename ProgramParts<P>::template On<S>;
template <class P>
using element_of = typename ProgramParts<P>::Element;

/// Number of fields of P<Tensors<E>>.
template <class P>
inline constexpr int field_count = count_fields<on_side<P, Fields>>();

template <class F>
struct KindOf {  // a plain field
  static constexpr Kind kind = Kind::number;
  static constexpr Direction direction = Direction::in;
  static constexpr int extent = 0;
  static constexpr int pass = 0;
  using Kind_ = void;
  using Element = F;
};
template <class K>
struct KindInfo;
template <Kind K, class T, int Extent = 0>
struct Info {
  static constexpr Kind kind = K;
  static constexpr int extent = Extent;
  using Element = T;
};
// clang-format off
template <class T> struct KindInfo<PerRow<T>> : Info<Kind::per_row, T> {};
template <class T> struct KindInfo<PerCol<T>> : Info<Kind::per_col, T> {};
template <class T> struct KindInfo<PerPair<T>> : Info<Kind::per_pair, T> {};
template <class T> struct KindInfo<Scalar<T>> : Info<Kind::scalar, T> {};
template <class T> struct KindInfo<DeviceScalar<T>> : Info<Kind::device_scalar, T> {};
template <class T> struct KindInfo<Tile<T>> : Info<Kind::tile, T> {};
template <class T> struct KindInfo<HalfTile<T>> : Info<Kind::half_tile, T> {};
template <class T> struct KindInfo<DoubleTile<T>> : Info<Kind::double_tile, T> {};
template <class T> struct KindInfo<Accumulate<T>> : Info<Kind::accumulate, T> {};
template <class T, int W> struct KindInfo<RowSum<T, W>> : Info<Kind::row_sum, T, W> {};
template <class T, int W> struct KindInfo<RowMax<T, W>> : Info<Kind::row_max, T, W> {};
template <class T, int H> struct KindInfo<ColSum<T, H>> : Info<Kind::col_sum, T, H> {};
template <int W> struct KindInfo<RowLogSumExp<W>> : Info<Kind::row_log_sum_exp, MaxSum, W> {};
template <> struct KindInfo<Off> : Info<Kind::off, float> {};
// clang-format on
template <Direction D, class K, int P>
struct KindOf<Fields::Field<D, K, P>> : KindInfo<K> {
  static constexpr Direction direction = D;
  static constexpr int pass = P;
  using Kind_ = K;
};

/// Compile-time facts of the I-th field of P<Tensors<E>>: kind, direction, extent, pass, Kind_, Element.
template <class P, int I>
using field_info = KindOf<std::remove_cvref_t<decltype(field<field_count<P>, I>(std::declval<on_side<P, Fields>&>()))>>;

template <class T, class E>
constexpr ElementType element_type() {
  using Stored = element_t<T, E>;
  if constexpr (std::is_same_v<Stored, bf16>)
    return ElementType::bfloat16;
  else if constexpr (std::is_same_v<Stored, MaxSum>)
    return ElementType::max_sum;
  else if constexpr (std::is_integral_v<Stored>)
    return ElementType::int32;
  else
    return ElementType::float32;
}

/// The field's name, read from the compiler's own spelling of a pointer to it.
template <class A>
struct Example {
  A value;
};
template <class A>
extern const Example<A> example;
template <class A, int N, int I>
constexpr auto field_pointer() {
  return &field<N, I>(example<A>.value);
}
#if !defined(__clang__)
template <auto Pointer>
constexpr std::string_view name_of() {
  std::string_view s = __PRETTY_FUNCTION__;
  s = s.substr(0, s.rfind(';') == std::string_view::npos ? s.rfind(']') : s.rfind(';'));
  while (!s.empty() && (s.back() == ')' || s.back() == ']')) s.remove_suffix(1);
  return s.substr(s.find_last_of(":.>") + 1);
}
#endif
/// The name of field I of the N that A has.
template <class A, int N, int I>
constexpr std::string_view name_of_field() {
#if defined(__clang__)  // 14 takes no pointer to a subobject as a template argument
  return "field";
#else
  return name_of<field_pointer<A, N, I>()>();
#endif
}
template <class P, int I>
constexpr std::string_view field_name() {
  return name_of_field<on_side<P, Fields>, field_count<P>, I>();
}

// ---- the accumulator that a program takes -----------------------------------------------------------------------------

template <class F>
struct CallOperator {
  static constexpr bool valid = false;
};
template <class T>
inline constexpr bool is_at = false;
template <class S>
inline constexpr bool is_at<At<S>> = true;
template <class P, class V, class... At_>
struct CallOperator<void (P::*)(V, At_...)> {
  static constexpr bool is_real = std::is_same_v<V, float>;
  static constexpr bool is_pair = std::is_same_v<V, Pair<float>>;
  static constexpr bool takes_at = sizeof...(At_) == 1;
  static constexpr bool valid = (is_real || is_pair) && sizeof...(At_) <= 1 && (is_at<At_> && ...);
};
template <class P, class V, class... At_>
struct CallOperator<void (P::*)(V, At_...) const> : CallOperator<void (P::*)(V, At_...)> {};

template <class P>
constexpr auto call_operator() {
  if constexpr (requires { &P::operator(); })
    return CallOperator<decltype(&P::operator())>{};
  else
    return CallOperator<void>{};
}

template <class P>
inline constexpr bool takes_pair = decltype(call_operator<P>())::is_pair;
template <class P>
inline constexpr bool takes_at = decltype(call_operator<P>())::takes_at;

/// V of Registers<V> for values of type T.
template <class P, class T>
using accumulator_t = std::conditional_t<takes_pair<P>, Pair<T>, T>;

template <class P, class V, int Number>
concept has_numbered_measure = requires(on_side<P, Measuring<V, element_of<P>, Number>>& p, V& acc) {
  p.measure(Pass<Number>{}, acc);
};
template <class P, class V>
concept has_single_measure = requires(on_side<P, Measuring<V, element_of<P>, 0>>& p, V& acc) {
  p.measure(acc);
};

/// How many measure passes P has.
template <class P, class V, int Number = 0>
constexpr int measure_passes() {
  if constexpr (Number == 0 && has_single_measure<P, V>)
    return 1;
  else if constexpr (has_numbered_measure<P, V, Number>)
    return measure_passes<P, V, Number + 1>();
  else
    return Number;
}

template <class P, int I>
constexpr bool field_has_value() {
  using Info = field_info<P, I>;
  if constexpr (Info::kind == Kind::number) {
    return true;
  } else {
    using Value = ValueOf<typename Info::Kind_, accumulator_t<P, float>>;
    if constexpr (Info::direction == Direction::in) return !std::is_same_v<typename Value::in, Unavailable>;
    if constexpr (Info::direction == Direction::out) return !std::is_same_v<typename Value::out, Unavailable>;
    return Info::kind == Kind::row_sum || Info::kind == Kind::row_max;
  }
}
template <class P, int I>
constexpr bool field_fits_direction() {
  using Info = field_info<P, I>;
  if constexpr (Info::direction == Direction::local) return Info::kind == Kind::row_sum || Info::kind == Kind::row_max;
  constexpr bool reads_only = Info::kind == Kind::per_row || Info::kind == Kind::per_col ||
                              Info::kind == Kind::per_pair || Info::kind == Kind::scalar ||
                              Info::kind == Kind::device_scalar || Info::kind == Kind::number;
  constexpr bool writes_only =
      Info::kind == Kind::accumulate || Info::kind == Kind::col_sum || Info::kind == Kind::row_log_sum_exp;
  return Info::direction == Direction::in ? !writes_only : !reads_only;
}
template <class P, int I>
constexpr int group_columns() {
  using Info = field_info<P, I>;
  if constexpr (Info::kind == Kind::row_sum || Info::kind == Kind::row_max || Info::kind == Kind::row_log_sum_exp)
    return Info::extent;
  else
    return 0;
}

template <class P, int... I>
constexpr void check_fields(std::integer_sequence<int, I...>) {
  static_assert(
      (field_fits_direction<P, I>() && ...),
      "a field of the epilogue program has a kind that cannot be used in its direction: PerRow, PerCol, PerPair, "
      "Scalar and DeviceScalar are In; Accumulate, ColSum and RowLogSumExp are Out; a Local is a RowSum or RowMax");
  static_assert((field_has_value<P, I>() && ...),
                "a field of the epilogue program has no value for its accumulator: HalfTile and PerPair need a call "
                "operator that takes a Pair, DoubleTile one that takes a single value");
  static_assert(
      ((group_columns<P, I>() % 16 == 0) && ...),
      "the width of a row reduction must be a multiple of 16 columns, so that pairs and vectors do not straddle "
      "its slots");
  constexpr int local_width =
      std::max({0, (field_info<P, I>::direction == Direction::local ? field_info<P, I>::extent : 0)...});
  static_assert(((field_info<P, I>::direction != Direction::local || field_info<P, I>::extent == local_width) && ...),
                "the Local fields of an epilogue program reduce over groups of one width");
  static_assert((local_width > 0) == (measure_passes<P, accumulator_t<P, float>>() > 0),
                "an epilogue program has Local fields if and only if it has measure()");
}

/// Refuses what is not an epilogue program, in one sentence. Every engine calls it before it instantiates anything else.
template <class P>
constexpr void check_program() {
  static_assert(ProgramParts<P>::is_program,
                "an epilogue program is a struct template over the side S, named with S = Tensors<E>");
  static_assert(decltype(call_operator<P>())::valid,
                "an epilogue program's call operator takes one accumulator, Real<S> or Pair<Real<S>>, and optionally "
                "At<S>, and returns void");
  static_assert(std::is_trivially_copyable_v<P>, "an epilogue program is trivially copyable: views and numbers only");
  check_fields<P>(std::make_integer_sequence<int, field_count<P>>{});
}

template <class P, int... I>
constexpr std::array<Field, sizeof...(I)> describe_fields(std::integer_sequence<int, I...>) {
  return {Field{field_name<P, I>(), field_info<P, I>::kind, field_info<P, I>::direction,
                element_type<typename field_info<P, I>::Element, element_of<P>>(), field_info<P, I>::extent}...};
}

}  // namespace detail

/// The fields of P = SomeProgram<Tensors<E>, Options…>, in order: names, kinds, directions, element types.
template <class P>
constexpr auto describe() {
  static_assert(detail::ProgramParts<P>::is_program,
                "an epilogue program is a struct template over the side S, named with S = Tensors<E>");
  return detail::describe_fields<P>(std::make_integer_sequence<int, detail::field_count<P>>{});
}

/// Whether P's call operator takes pairs of columns.
template <class P>
inline constexpr bool takes_pairs = detail::takes_pair<P>;

}  // namespace coda
