// The definition of correct: programs on plain numbers, by loops over rows and columns, in double precision.
//
// It shares the language with the engines (a program is the same struct) and nothing else: no lanes, no blocks, no packing.
// Results are not rounded to the type they would be stored in; only rounded<E>() inside a program rounds.
//
// The number type is a parameter. double gives values, Dual<double, 1> a directional derivative of the whole program.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "coda/error.h"
#include "coda/program.h"
#include "coda/vjp.h"

namespace coda::oracle {

/// A matrix of its own.
template <class T>
struct Grid {
  int64_t rows = 0, cols = 0;
  std::vector<T> values;

  Grid() = default;
  Grid(int64_t rows_, int64_t cols_, T value = T(0.0))
      : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_), value) {}
  T& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  const T& operator()(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
};

/// What a program stores in one Out field, in the field's stored shape.
template <class T = double>
struct Output {
  std::string_view name;
  Field field;
  Grid<T> value;    // of a RowLogSumExp the log-sum-exp of each slot
  Grid<T> maximum;  // of a RowLogSumExp the maximum of each slot; otherwise empty
};

/// The outputs of a program, in the order of its Out fields. Fields that are switched off have none.
template <class T = double>
struct Outputs {
  std::vector<Output<T>> list;

  const Output<T>& operator[](std::string_view name) const {
    for (const Output<T>& output : list)
      if (output.name == name) return output;
    throw Error("the program has no output " + std::string(name));
  }
};

/// The elements of a factor of a·bᵀ, as [rows, depth].
template <class E>
Grid<double> elements(const Matrix<E>& x) {
  Grid<double> out(x.rows, x.cols);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j) out(i, j) = static_cast<double>(x(i, j));
  return out;
}
template <class E>
Grid<double> elements(const Transposed<E>& x) {
  Grid<double> out(x.of.cols, x.of.rows);
  for (int64_t i = 0; i < out.rows; ++i)
    for (int64_t j = 0; j < out.cols; ++j) out(i, j) = static_cast<double>(x.of(j, i));
  return out;
}

/// a·bᵀ.
Grid<double> accumulators(const Grid<double>& a, const Grid<double>& b);

/// A stored element of the operand `field` as a number: what it is, and nothing known of its derivative.
template <class T>
struct AsStored {
  T operator()(double value, std::string_view /*field*/, int64_t /*row*/, int64_t /*col*/) const { return T(value); }
};

namespace detail {

using namespace coda::detail;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
/// Packed order: where the first of pair p stands. Its partner stands 8 further on.
constexpr int64_t first_of_pair(int64_t p) {
  return p / 8 * 16 + p % 8;
}

/// One accumulator, or two that form a pair.
struct Place {
  int64_t row, lane;  // lane: the column or, of pairs, the pair's number
  int64_t col;        // the column of the accumulator or of the first of the pair
};

template <class P, class T, class Number, class Fields>
class Run;

template <class P, class T, class Number, int... I>
class Run<P, T, Number, std::integer_sequence<int, I...>> {
  static constexpr bool kPairs = takes_pair<P>;
  static constexpr int kFields = sizeof...(I);
  using E = element_of<P>;
  using V = accumulator_t<P, T>;
  template <int N>
  using Info = field_info<P, N>;
  static constexpr int kPasses = measure_passes<P, V>();

 public:
  Run(const Grid<T>& acc, const P& program, const Number& number) : acc_(acc), program_(program), number_(number) {
    (prepare<I>(), ...);
  }

  Outputs<T> operator()() {
    const int64_t group = kPasses > 0 ? local_group() : std::max<int64_t>(acc_.cols, 1);
    for (int64_t row = 0; row < acc_.rows; ++row)
      for (int64_t begin = 0; begin < acc_.cols; begin += group) {
        const int64_t end = std::min(begin + group, acc_.cols);
        if constexpr (kPasses > 0) measure<0>(row, begin, end);
        each_place(row, begin, end, [&](const Place& at) { apply(at); });
      }
    (finish<I>(), ...);
    return std::move(outputs_);
  }

 private:
  static int64_t local_group() {
    int64_t group = 0;
    ((Info<I>::direction == Direction::local ? void(group = Info<I>::extent) : void()), ...);
    return group;
  }
  template <class Body>
  void each_place(int64_t row, int64_t begin, int64_t end, Body&& body) {
    if constexpr (kPairs) {
      for (int64_t p = begin / 2; p < end / 2; ++p) body(Place{row, p, first_of_pair(p)});
    } else {
      for (int64_t col = begin; col < end; ++col) body(Place{row, col, col});
    }
  }
  V accumulator(const Place& at) const {
    if constexpr (kPairs)
      return {acc_(at.row, at.col), acc_(at.row, at.col + 8)};
    else
      return acc_(at.row, at.col);
  }

  template <int N>
  const auto& view() const {
    return field<kFields, N>(program_);
  }
  template <int N>
  static constexpr std::string_view name() {
    return describe<P>()[N].name;
  }

  // ---- what a field holds before the program runs

  template <int N>
  T element(int64_t i, int64_t j) const {
    return number_(static_cast<double>(view<N>()(i, j)), name<N>(), i, j);
  }
  template <int N>
  T entry(int64_t i) const {
    return number_(static_cast<double>(view<N>()[i]), name<N>(), 0, i);
  }

  template <int N>
  auto input(const Place& at) const {
    constexpr Kind kind = Info<N>::kind;
    if constexpr (kind == Kind::per_row) {
      if constexpr (std::is_integral_v<typename Info<N>::Element>)
        return static_cast<Index<T>>(view<N>()[at.row]);
      else
        return entry<N>(at.row);
    } else if constexpr (kind == Kind::per_col) {
      if constexpr (kPairs)
        return Pair<T>{entry<N>(at.col), entry<N>(at.col + 8)};
      else
        return entry<N>(at.col);
    } else if constexpr (kind == Kind::per_pair) {
      return entry<N>(at.lane % view<N>().size);
    } else if constexpr (kind == Kind::scalar) {
      return number_(static_cast<double>(view<N>()), name<N>(), 0, 0);
    } else if constexpr (kind == Kind::device_scalar) {
      return number_(static_cast<double>(*view<N>()), name<N>(), 0, 0);
    } else if constexpr (kind == Kind::tile) {
      if constexpr (kPairs)
        return Pair<T>{element<N>(at.row, at.col), element<N>(at.row, at.col + 8)};
      else
        return element<N>(at.row, at.col);
    } else if constexpr (kind == Kind::half_tile) {
      return element<N>(at.row, at.lane);
    } else if constexpr (kind == Kind::double_tile) {
      const int64_t col = first_of_pair(at.col);
      return Pair<T>{element<N>(at.row, col), element<N>(at.row, col + 8)};
    } else {
      static_assert(kind == Kind::row_sum || kind == Kind::row_max);
      return element<N>(at.col / Info<N>::extent, at.row);
    }
  }

  template <class FieldType>
  static FieldType unwritten() {
    const T nan = T(std::numeric_limits<double>::quiet_NaN());
    if constexpr (std::is_same_v<FieldType, T>)
      return nan;
    else if constexpr (std::is_same_v<FieldType, Pair<T>>)
      return {nan, nan};
    else if constexpr (requires { FieldType{nan}; })
      return FieldType{nan};  // a contribution to a reduction
    else
      return FieldType{};
  }

  template <int N, class S>
  auto initial(const Place& at) const {
    using FieldType = std::remove_cvref_t<decltype(field<kFields, N>(std::declval<on_side<P, S>&>()))>;
    if constexpr (Info<N>::kind == Kind::number)
      return view<N>();
    else if constexpr (Info<N>::kind == Kind::off)
      return Nothing{};
    else if constexpr (Info<N>::direction == Direction::in)
      return input<N>(at);
    else if constexpr (Info<N>::direction == Direction::local && std::is_same_v<FieldType, T>)
      return locals_[N];
    else
      return unwritten<FieldType>();
  }

  // ---- the passes

  template <int kPass>
  void measure(int64_t row, int64_t begin, int64_t end) {
    using Side = Measuring<V, E, kPass>;
    bool first = true;
    T gathered[kFields] = {};
    each_place(row, begin, end, [&](const Place& at) {
      on_side<P, Side> program{initial<I, Side>(at)...};
      V acc = accumulator(at);
      if constexpr (has_single_measure<P, V>)
        program.measure(acc);
      else
        program.measure(Pass<kPass>{}, acc);
      if constexpr (kPairs) {
        acc_(at.row, at.col) = acc.first;
        acc_(at.row, at.col + 8) = acc.second;
      } else {
        acc_(at.row, at.col) = acc;
      }
      (gather<I, kPass>(field<kFields, I>(program), first, gathered), ...);
      first = false;
    });
    (keep<I, kPass>(gathered), ...);
    if constexpr (kPass + 1 < kPasses) measure<kPass + 1>(row, begin, end);
  }
  template <int N, int kPass>
  static constexpr bool fills = Info<N>::direction == Direction::local&& Info<N>::pass == kPass;
  template <int N, int kPass, class F>
  void gather(const F& contribution, bool first, T* gathered) const {
    if constexpr (fills<N, kPass>)
      gathered[N] = first ? contribution.value : combine<N>(gathered[N], contribution.value);
  }
  template <int N, int kPass>
  void keep(const T* gathered) {
    if constexpr (fills<N, kPass>) locals_[N] = gathered[N];
  }
  template <int N>
  static T combine(T a, T b) {
    if constexpr (Info<N>::kind == Kind::row_max)
      return max(a, b);
    else
      return a + b;
  }

  void apply(const Place& at) {
    using Side = Registers<V, E>;
    on_side<P, Side> program{initial<I, Side>(at)...};
    const V acc = accumulator(at);
    if constexpr (takes_at<P>)
      program(acc, At<Side>{static_cast<Index<T>>(at.row), static_cast<Index<T>>(at.col)});
    else
      program(acc);
    (store<I>(at, field<kFields, I>(program)), ...);
  }

  // ---- outputs

  template <int N>
  static constexpr bool is_output = Info<N>::direction == Direction::out&& Info<N>::kind != Kind::off;

  template <int N>
  void prepare() {
    if constexpr (is_output<N>) {
      constexpr Kind kind = Info<N>::kind;
      const T nan = T(std::numeric_limits<double>::quiet_NaN());
      const int64_t m = acc_.rows, n = acc_.cols;
      Output<T> output{name<N>(), describe<P>()[N], {}, {}};
      if constexpr (kind == Kind::half_tile)
        output.value = Grid<T>(m, n / 2, nan);
      else if constexpr (kind == Kind::double_tile)
        output.value = Grid<T>(m, 2 * n, nan);
      else if constexpr (kind == Kind::row_sum || kind == Kind::row_max || kind == Kind::row_log_sum_exp)
        output.value = Grid<T>(ceil_div(n, Info<N>::extent), m, nan);
      else if constexpr (kind == Kind::col_sum)
        output.value = Grid<T>(ceil_div(m, Info<N>::extent), n, nan);
      else
        output.value = Grid<T>(m, n, nan);
      slot_of_[N] = outputs_.list.size();
      outputs_.list.push_back(std::move(output));
      if constexpr (kind == Kind::row_log_sum_exp) logits_[N] = Grid<T>(m, n);
    }
  }

  template <int N, class F>
  void store(const Place& at, const F& x) {
    if constexpr (is_output<N>) {
      constexpr Kind kind = Info<N>::kind;
      Grid<T>& out = outputs_.list[slot_of_[N]].value;
      if constexpr (kind == Kind::half_tile) {
        out(at.row, at.lane) = x;
      } else if constexpr (kind == Kind::double_tile) {
        out(at.row, first_of_pair(at.col)) = x.first;
        out(at.row, first_of_pair(at.col) + 8) = x.second;
      } else if constexpr (kind == Kind::row_sum || kind == Kind::row_max) {
        T& slot = out(at.col / Info<N>::extent, at.row);
        slot = at.col % Info<N>::extent == 0 ? x.value : combine<N>(slot, x.value);
      } else if constexpr (kPairs) {
        store_one<N>(out, at.row, at.col, x.first);
        store_one<N>(out, at.row, at.col + 8, x.second);
      } else {
        store_one<N>(out, at.row, at.col, x);
      }
    }
  }
  template <int N>
  void store_one(Grid<T>& out, int64_t row, int64_t col, T x) {
    constexpr Kind kind = Info<N>::kind;
    if constexpr (kind == Kind::accumulate) {
      out(row, col) = element<N>(row, col) + x;
    } else if constexpr (kind == Kind::col_sum) {
      T& slot = out(row / Info<N>::extent, col);
      slot = row % Info<N>::extent == 0 ? x : slot + x;
    } else if constexpr (kind == Kind::row_log_sum_exp) {
      logits_[N](row, col) = x;
    } else {
      static_assert(kind == Kind::tile);
      out(row, col) = x;
    }
  }

  template <int N>
  void finish() {
    if constexpr (Info<N>::kind == Kind::row_log_sum_exp) {
      Output<T>& output = outputs_.list[slot_of_[N]];
      output.maximum = Grid<T>(output.value.rows, output.value.cols);
      for (int64_t slot = 0; slot < output.value.rows; ++slot)
        for (int64_t row = 0; row < acc_.rows; ++row) {
          const int64_t begin = slot * Info<N>::extent, end = std::min(begin + Info<N>::extent, acc_.cols);
          T top = logits_[N](row, begin);
          for (int64_t col = begin + 1; col < end; ++col) top = max(top, logits_[N](row, col));
          output.maximum(slot, row) = top;
          output.value(slot, row) = top;
          if (!(top > T(-std::numeric_limits<double>::infinity()))) continue;  // log 0, or a NaN
          T sum = T(0.0);
          for (int64_t col = begin; col < end; ++col) sum = sum + exp(logits_[N](row, col) - top);
          output.value(slot, row) = top + log(sum);
        }
    }
  }

  Grid<T> acc_;
  const P& program_;
  const Number& number_;
  T locals_[kFields];
  size_t slot_of_[kFields] = {};
  Grid<T> logits_[kFields];  // of RowLogSumExp fields
  Outputs<T> outputs_;
};

}  // namespace detail

/// The program over accumulators that are already there, on numbers of type T. number(value, field, row, col) makes a T of
/// a stored element of a real In field: a place to put its derivative.
template <class T, class P, class Number = AsStored<T>>
Outputs<T> apply(const Grid<T>& acc, const P& program, const Number& number = {}) {
  coda::detail::check_program<P>();
  using Fields = std::make_integer_sequence<int, coda::detail::field_count<P>>;
  return detail::Run<P, T, Number, Fields>(acc, program, number)();
}

/// What coda::gemm(cpu, a, b, program) stores.
template <class A, class B, class P>
Outputs<double> gemm(const A& a, const B& b, const P& program) {
  return apply<double>(accumulators(elements(a), elements(b)), program);
}

/// What coda::map(cpu, x, program) stores.
template <class T = double, class E, class P>
Outputs<T> map(const Matrix<E>& x, const P& program) {
  const Grid<double> values = elements(x);
  Grid<T> acc(x.rows, x.cols);
  for (size_t i = 0; i < values.values.size(); ++i) acc.values[i] = T(values.values[i]);
  return apply<T>(acc, program);
}

}  // namespace coda::oracle
