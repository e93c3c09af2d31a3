// A program over a block of accumulators, on SIMD lanes. One port per field moves its values between memory and lanes; the
// loop below walks rows, slots of the program's reductions, and lanes.
#pragma once
#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "coda/cpu/lanes.h"
#include "coda/gemm.h"

namespace coda::cpu {

/// Where one step of lanes stands in the matrix.
struct Step {
  int64_t row, col;  // of the accumulators; of pairs, where the first one's block of 16 columns begins
  int64_t lane;      // the first lane's column or, of pairs, its number in the row
  int valid;         // lanes in use
};

/// What every port can be asked; a port adds what its kind does: load for an In, store for an Out.
struct Port {
  static constexpr int kWaiting = 0;  // floats of memory that it needs while it runs
  CODA_FN void wait_in(float*) {}
  CODA_FN void begin_row(int64_t) {}
  CODA_FN void end_step(int64_t /*row*/, int64_t /*end_col*/, bool /*last*/) {}
};

template <bool kPairs, class Isa, class T>
CODA_FN auto load_tile(const T* row, const Step& at) {
  if constexpr (kPairs)
    return load_pairs<Isa>(row, at.lane, at.valid);
  else
    return load<Isa>(row + at.lane, at.valid);
}
template <class Isa, class T>
CODA_FN void store_tile(T* row, const Step& at, Lanes<Isa> x) {
  store<Isa>(row + at.lane, x, at.valid);
}
template <class Isa, class T>
CODA_FN void store_tile(T* row, const Step& at, Pair<Lanes<Isa>> x) {
  store_pairs<Isa>(row, at.lane, x, at.valid);
}

/// Kind K in direction D, activations of type E, accumulators in pairs or not. Built from the caller's view of the field.
template <class K, Direction D, class E, bool kPairs, class Isa>
struct PortOf;

// ---- values that do not move ------------------------------------------------------------------------------------------

template <class N, class E, bool kPairs, class Isa>
struct NumberPort : Port {
  N value;
  CODA_FN explicit NumberPort(const N& v) : value(v) {}
  CODA_FN N load(const Step&) const { return value; }
};
template <Direction D, class E, bool kPairs, class Isa>
struct PortOf<Off, D, E, kPairs, Isa> : Port {
  CODA_FN explicit PortOf(Nothing) {}
  CODA_FN Nothing load(const Step&) const { return {}; }
  CODA_FN void store(const Step&, Nothing) {}
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<Scalar<T>, Direction::in, E, kPairs, Isa> : Port {
  Lanes<Isa> value;
  CODA_FN explicit PortOf(T v) : value(v) {}
  CODA_FN Lanes<Isa> load(const Step&) const { return value; }
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<DeviceScalar<T>, Direction::in, E, kPairs, Isa> : Port {
  Lanes<Isa> value;
  CODA_FN explicit PortOf(const T* p) : value(*p) {}
  CODA_FN Lanes<Isa> load(const Step&) const { return value; }
};

// ---- vectors ----------------------------------------------------------------------------------------------------------

template <class T, class E, bool kPairs, class Isa>
struct PortOf<PerRow<T>, Direction::in, E, kPairs, Isa> : Port {
  const T* data;
  typename detail::StoredAs<T, Lanes<Isa>>::type value;
  CODA_FN explicit PortOf(Vector<const T> v) : data(v.data) {}
  CODA_FN void begin_row(int64_t row) { value = data[row]; }
  CODA_FN auto load(const Step&) const { return value; }
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<PerCol<T>, Direction::in, E, kPairs, Isa> : Port {
  const T* data;
  CODA_FN explicit PortOf(Vector<const T> v) : data(v.data) {}
  CODA_FN auto load(const Step& at) const { return load_tile<kPairs, Isa>(data, at); }
};
template <class T, class E, class Isa>
struct PortOf<PerPair<T>, Direction::in, E, true, Isa> : Port {
  static constexpr int width = Lanes<Isa>::width;
  const T* data;
  int64_t period, start = 0;  // of the period that the last step was in
  CODA_FN explicit PortOf(Vector<const T> v) : data(v.data), period(v.size) {}
  CODA_FN Lanes<Isa> load(const Step& at) {
    const int64_t first = in_period(at.lane);
    // The period is a multiple of 8: only registers of more than 8 lanes can run over its end.
    if (width <= 8 || first + width <= period) return cpu::load<Isa>(data + first, at.valid);
    alignas(64) T lanes[width] = {};
    for (int half = 0; half < at.valid; half += 8)
      std::memcpy(lanes + half, data + (first + half) % period, 8 * sizeof(T));
    return cpu::load<Isa>(static_cast<const T*>(lanes));
  }
  /// lane % period, mostly without a division: lanes ascend.
  CODA_FN int64_t in_period(int64_t lane) {
    if (lane - start >= period) start += period;
    if (lane < start || lane - start >= period) start = lane - lane % period;
    return lane - start;
  }
};

// ---- tiles --------------------------------------------------------------------------------------------------------------

template <class T>
struct RowOf : Port {  // a matrix, and its current row
  Matrix<T> matrix;
  T* row = nullptr;
  CODA_FN explicit RowOf(Matrix<T> m) : matrix(m) {}
  CODA_FN void begin_row(int64_t r) { row = matrix.row(r); }
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<Tile<T>, Direction::in, E, kPairs, Isa> : RowOf<const detail::element_t<T, E>> {
  using RowOf<const detail::element_t<T, E>>::RowOf;
  CODA_FN auto load(const Step& at) const { return load_tile<kPairs, Isa>(this->row, at); }
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<Tile<T>, Direction::out, E, kPairs, Isa> : RowOf<detail::element_t<T, E>> {
  using RowOf<detail::element_t<T, E>>::RowOf;
  template <class V>
  CODA_FN void store(const Step& at, V x) {
    store_tile<Isa>(this->row, at, x);
  }
};
template <class T, class E, class Isa>
struct PortOf<HalfTile<T>, Direction::in, E, true, Isa> : RowOf<const detail::element_t<T, E>> {
  using RowOf<const detail::element_t<T, E>>::RowOf;
  CODA_FN Lanes<Isa> load(const Step& at) const { return load_tile<false, Isa>(this->row, at); }
};
template <class T, class E, class Isa>
struct PortOf<HalfTile<T>, Direction::out, E, true, Isa> : PortOf<Tile<T>, Direction::out, E, true, Isa> {
  using PortOf<Tile<T>, Direction::out, E, true, Isa>::PortOf;
};
template <class T, class E, class Isa>
struct PortOf<DoubleTile<T>, Direction::in, E, false, Isa> : RowOf<const detail::element_t<T, E>> {
  using RowOf<const detail::element_t<T, E>>::RowOf;
  CODA_FN Pair<Lanes<Isa>> load(const Step& at) const {
    // Twice as much as what other tiles read, and it waits in the second-level cache: the next row is fetched meanwhile.
    const char* below = reinterpret_cast<const char*>(this->row + this->matrix.stride + packed_column(at.lane));
    constexpr int64_t bytes = 2 * Lanes<Isa>::width * int64_t{sizeof(*this->row)};
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(below + i);
    return load_tile<true, Isa>(this->row, at);
  }
};
template <class T, class E, class Isa>
struct PortOf<DoubleTile<T>, Direction::out, E, false, Isa> : PortOf<Tile<T>, Direction::out, E, false, Isa> {
  using PortOf<Tile<T>, Direction::out, E, false, Isa>::PortOf;
};
template <class T, class E, bool kPairs, class Isa>
struct PortOf<Accumulate<T>, Direction::out, E, kPairs, Isa> : RowOf<detail::element_t<T, E>> {
  using RowOf<detail::element_t<T, E>>::RowOf;
  template <class V>
  CODA_FN void store(const Step& at, V x) {
    store_tile<Isa>(this->row, at,
                    load_tile<kPairs, Isa>(static_cast<const detail::element_t<T, E>*>(this->row), at) + x);
  }
};

// ---- partial reductions ---------------------------------------------------------------------------------------------------

template <class Isa>
struct SumLanes {
  static constexpr float identity = 0;
  static CODA_FN Lanes<Isa> combine(Lanes<Isa> a, Lanes<Isa> b) { return a + b; }
  static CODA_FN float reduce(Lanes<Isa> x) { return sum<Isa>(x); }
};
template <class Isa>
struct MaxLanes {
  static constexpr float identity = -std::numeric_limits<float>::infinity();
  static CODA_FN Lanes<Isa> combine(Lanes<Isa> a, Lanes<Isa> b) { return max(a, b); }
  static CODA_FN float reduce(Lanes<Isa> x) { return maximum<Isa>(x); }
};

/// A running reduction along a row.
template <class Op, class Isa>
struct RowReduction {
  Lanes<Isa> running = Op::identity;
  template <class C>
  CODA_FN void take(const Step& at, const C& contribution) {
    running = Op::combine(running, keep<Isa>(contribution.value, at.valid, Op::identity));
  }
  CODA_FN float finish() {
    const float result = Op::reduce(running);
    running = Op::identity;
    return result;
  }
};

template <class Op, int kWidth, class T, class Isa>
struct RowPartialOut : Port {
  static_assert(std::is_same_v<T, float>, "partial reductions are stored in float");
  Matrix<float> out;  // [slots, M]
  RowReduction<Op, Isa> reduction;
  CODA_FN explicit RowPartialOut(Matrix<float> m) : out(m) {}
  template <class C>
  CODA_FN void store(const Step& at, const C& contribution) {
    reduction.take(at, contribution);
  }
  CODA_FN void end_step(int64_t row, int64_t end_col, bool last) {
    if (last || end_col % kWidth == 0) out((end_col - 1) / kWidth, row) = reduction.finish();
  }
};
template <int kWidth, class Isa>
struct RowPartialIn : Port {
  Matrix<const float> partial;  // [slots, M]
  CODA_FN explicit RowPartialIn(Matrix<const float> m) : partial(m) {}
  CODA_FN Lanes<Isa> load(const Step& at) const { return partial(at.col / kWidth, at.row); }
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowSum<T, W>, Direction::out, E, kPairs, Isa> : RowPartialOut<SumLanes<Isa>, W, T, Isa> {
  using RowPartialOut<SumLanes<Isa>, W, T, Isa>::RowPartialOut;
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowMax<T, W>, Direction::out, E, kPairs, Isa> : RowPartialOut<MaxLanes<Isa>, W, T, Isa> {
  using RowPartialOut<MaxLanes<Isa>, W, T, Isa>::RowPartialOut;
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowSum<T, W>, Direction::in, E, kPairs, Isa> : RowPartialIn<W, Isa> {
  using RowPartialIn<W, Isa>::RowPartialIn;
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowMax<T, W>, Direction::in, E, kPairs, Isa> : RowPartialIn<W, Isa> {
  using RowPartialIn<W, Isa>::RowPartialIn;
};

/// Rows of a slot come one after the other and a block begins with a slot, so the output itself is the running sum.
template <class T, int H, class E, bool kPairs, class Isa>
struct PortOf<ColSum<T, H>, Direction::out, E, kPairs, Isa> : Port {
  static_assert(std::is_same_v<T, float>, "partial reductions are stored in float");
  Matrix<float> out;  // [slots, N]
  float* slot = nullptr;
  bool first = true;
  CODA_FN explicit PortOf(Matrix<float> m) : out(m) {}
  CODA_FN void begin_row(int64_t row) {
    slot = out.row(row / H);
    first = row % H == 0;
  }
  template <class V>
  CODA_FN void store(const Step& at, V x) {
    if (!first) x = load_tile<kPairs, Isa>(static_cast<const float*>(slot), at) + x;
    store_tile<Isa>(slot, at, x);
  }
};

/// A slot's values wait in a buffer: one pass finds their maximum, one sums, with one exp per value.
template <int W, class E, bool kPairs, class Isa>
struct PortOf<RowLogSumExp<W>, Direction::out, E, kPairs, Isa> : Port {
  static constexpr int width = Lanes<Isa>::width, kWaiting = W + width;
  Matrix<MaxSum> out;  // [slots, M]
  float* waiting = nullptr;
  int count = 0;
  CODA_FN explicit PortOf(Matrix<MaxSum> m) : out(m) {}
  CODA_FN void wait_in(float* memory) { waiting = memory; }
  CODA_FN void store(const Step& at, Lanes<Isa> x) {
    cpu::store<Isa>(waiting + count, x);
    count += at.valid;
  }
  CODA_FN void store(const Step& at, Pair<Lanes<Isa>> x) {
    store(at, x.first);
    store(at, x.second);
  }
  CODA_FN void end_step(int64_t row, int64_t end_col, bool last) {
    if (!last && end_col % W != 0) return;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    Lanes<Isa> largest = kNone;
    for (int i = 0; i < count; i += width) {
      const int n = count - i < width ? count - i : width;
      largest = max(largest, keep<Isa>(cpu::load<Isa>(waiting + i), n, kNone));
    }
    const float top = maximum<Isa>(largest);
    // All of a slot at -inf: exp(-inf - -inf) would be NaN, and the slot's sum is zero.
    const Lanes<Isa> shift = top == kNone ? 0.f : top;
    Lanes<Isa> total = 0.f;
    for (int i = 0; i < count; i += width) {
      const int n = count - i < width ? count - i : width;
      total = total + keep<Isa>(exp(cpu::load<Isa>(waiting + i) - shift), n, 0.f);
    }
    out((end_col - 1) / W, row) = {top, sum<Isa>(total)};
    count = 0;
  }
};

/// A local: what measure() gathers over a group of columns, then a value for later passes.
template <class Op, int kWidth, class Isa>
struct LocalPort : Port {
  static constexpr int group = kWidth;
  RowReduction<Op, Isa> reduction;
  Lanes<Isa> value;
  CODA_FN explicit LocalPort(Nothing) {}
  CODA_FN Lanes<Isa> load(const Step&) const { return value; }
  template <class C>
  CODA_FN void gather(const Step& at, const C& contribution) {
    reduction.take(at, contribution);
  }
  CODA_FN void end_group() { value = reduction.finish(); }
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowSum<T, W>, Direction::local, E, kPairs, Isa> : LocalPort<SumLanes<Isa>, W, Isa> {
  using LocalPort<SumLanes<Isa>, W, Isa>::LocalPort;
};
template <class T, int W, class E, bool kPairs, class Isa>
struct PortOf<RowMax<T, W>, Direction::local, E, kPairs, Isa> : LocalPort<MaxLanes<Isa>, W, Isa> {
  using LocalPort<MaxLanes<Isa>, W, Isa>::LocalPort;
};

// ---- the loop -----------------------------------------------------------------------------------------------------------

template <class Info, class E, bool kPairs, class Isa>
struct PortFor {
  using type = PortOf<typename Info::Kind_, Info::direction, E, kPairs, Isa>;
};
template <class Info, class E, bool kPairs, class Isa>
requires std::is_void_v<typename Info::Kind_>
struct PortFor<Info, E, kPairs, Isa> {
  using type = NumberPort<typename Info::Element, E, kPairs, Isa>;
};

template <class P, class Isa, class Numbers>
class BlockRunner;

template <class P, class Isa, int... I>
class BlockRunner<P, Isa, std::integer_sequence<int, I...>> {
  static constexpr bool kPairs = detail::takes_pair<P>;
  static constexpr int kFields = sizeof...(I);
  static constexpr int kWidth = Lanes<Isa>::width;
  static constexpr int kStepCols = kPairs ? 2 * kWidth : kWidth;
  using Block = detail::Block;
  using E = detail::element_of<P>;
  using V = detail::accumulator_t<P, Lanes<Isa>>;
  using Side = Registers<V, E>;
  template <int N>
  using Info = detail::field_info<P, N>;
  template <int N>
  using PortType = typename PortFor<Info<N>, E, kPairs, Isa>::type;
  template <int N>
  static constexpr bool is_local = Info<N>::direction == Direction::local;
  template <int N>
  static constexpr bool is_out = Info<N>::direction == Direction::out;

  static constexpr int kPasses = detail::measure_passes<P, V>();
  /// Columns that measure() sees together; 0 without locals.
  static constexpr int local_group() {
    int group = 0;
    ((group = is_local<I> ? Info<I>::extent : group), ...);
    return group;
  }
  /// No step crosses a multiple of this, so that none straddles two slots.
  static constexpr int step_bound() {
    int bound = 0;
    ((bound = std::gcd(bound, detail::group_columns<P, I>())), ...);
    return bound;
  }

 public:
  CODA_FN BlockRunner(const P& program, const Block& block)
      : block_(block),
        ports_(
            detail::with_fields<kFields>(program, [](const auto&... field) { return Ports(PortType<I>(field)...); })) {}

  static constexpr int kWaiting = (PortType<I>::kWaiting + ... + 0);

  /// waiting: kWaiting floats. Not part of this object: one array in it, and compilers keep all of it in memory, the running
  /// sums of a row too.
  CODA_FN void run(float* waiting) {
    ((port<I>().wait_in(waiting), waiting += PortType<I>::kWaiting), ...);
    for (int64_t r = 0; r < block_.rows; ++r) {
      acc_ = block_.acc + r * block_.acc_stride;
      row_ = block_.row + r;
      (port<I>().begin_row(row_), ...);
      if constexpr (kPasses > 0) {
        for (int64_t c = 0; c < block_.cols; c += local_group()) {
          const int64_t end = std::min<int64_t>(c + local_group(), block_.cols);
          measure_passes<0>(c, end);
          apply(c, end);
        }
      } else {
        apply(0, block_.cols);
      }
    }
  }

 private:
  using Ports = std::tuple<PortType<I>...>;

  template <int N>
  CODA_FN auto& port() {
    return std::get<N>(ports_);
  }

  /// body(step, first column of the step, column after it) over columns [begin, end) of the block.
  template <class Body>
  CODA_FN void for_steps(int64_t begin, int64_t end, Body&& body) {
    constexpr int kBound = step_bound();
    int64_t c = begin;
    const auto step = [&](int valid) __attribute__((always_inline)) {
      const int64_t col = block_.col + c, next = c + (kPairs ? 2 * valid : valid);
      body(Step{row_, col, kPairs ? col / 2 : col, valid}, c, next);
      c = next;
    };
    // Whole registers, which is known when this is compiled, for as long as there are any.
    if constexpr (kBound % kStepCols == 0)
      while (c + kStepCols <= end) step(kWidth);
    while (c < end) {
      int64_t n = std::min<int64_t>(kStepCols, end - c);
      if constexpr (kBound % kStepCols != 0) n = std::min<int64_t>(n, kBound - c % kBound);
      step(static_cast<int>(kPairs ? n / 2 : n));
    }
  }
  CODA_FN V accumulator(const Step& at, int64_t c) const {
    if constexpr (kPairs)
      return load_pairs<Isa>(static_cast<const float*>(acc_), c / 2, at.valid);
    else
      return load<Isa>(static_cast<const float*>(acc_ + c), at.valid);
  }
  CODA_FN static At<Side> position(const Step& at) {
    if constexpr (kPairs) {
      const Ints<Isa> pair = iota<Isa>() + Ints<Isa>(static_cast<int32_t>(at.lane));
      // 16(p/8) + p%8
      return {static_cast<int32_t>(at.row), Ints<Isa>((pair.v + (pair.v & IntBatch<Isa>(~7))))};
    } else {
      return {static_cast<int32_t>(at.row), iota<Isa>() + Ints<Isa>(static_cast<int32_t>(at.col))};
    }
  }

  /// The value that field N holds before the program runs on side S.
  template <int N, class S>
  CODA_FN auto initial(const Step& at) {
    using FieldType = std::remove_cvref_t<decltype(detail::field<kFields, N>(std::declval<detail::on_side<P, S>&>()))>;
    if constexpr (requires { FieldType(port<N>().load(at)); })
      return FieldType(port<N>().load(at));
    else
      return FieldType{};
  }

  template <int kPass>
  CODA_FN void measure_passes(int64_t begin, int64_t end) {
    using Measure = Measuring<V, E, kPass>;
    for_steps(
        begin, end, [&](const Step& at, int64_t c, int64_t) __attribute__((always_inline)) {
          detail::on_side<P, Measure> program{initial<I, Measure>(at)...};
          V acc = accumulator(at, c);
          if constexpr (detail::has_single_measure<P, V>)
            program.measure(acc);
          else
            program.measure(Pass<kPass>{}, acc);
          if constexpr (kPairs)
            store_pairs<Isa>(acc_, c / 2, acc, at.valid);
          else
            store<Isa>(acc_ + c, acc, at.valid);
          (gather<I, kPass>(at, detail::field<kFields, I>(program)), ...);
        });
    (end_group<I, kPass>(), ...);
    if constexpr (kPass + 1 < kPasses) measure_passes<kPass + 1>(begin, end);
  }
  template <int N, int kPass, class F>
  CODA_FN void gather(const Step& at, const F& value) {
    if constexpr (is_local<N> && Info<N>::pass == kPass) port<N>().gather(at, value);
  }
  template <int N, int kPass>
  CODA_FN void end_group() {
    if constexpr (is_local<N> && Info<N>::pass == kPass) port<N>().end_group();
  }

  CODA_FN void apply(int64_t begin, int64_t end) {
    for_steps(
        begin, end, [&](const Step& at, int64_t c, int64_t next) __attribute__((always_inline)) {
          detail::on_side<P, Side> program{initial<I, Side>(at)...};
          const V acc = accumulator(at, c);
          if constexpr (detail::takes_at<P>)
            program(acc, position(at));
          else
            program(acc);
          (put<I>(at, detail::field<kFields, I>(program)), ...);
          const int64_t end_col = block_.col + next;
          (port<I>().end_step(row_, end_col, end_col == block_.n), ...);
        });
  }
  template <int N, class F>
  CODA_FN void put(const Step& at, const F& value) {
    if constexpr (is_out<N>) port<N>().store(at, value);
  }

  const Block block_;  // a copy: what registers hold need not be read again after every store
  Ports ports_;
  float* acc_ = nullptr;
  int64_t row_ = 0;
};

}  // namespace coda::cpu

namespace coda::detail {

template <class P, class Isa>
void epilogue(const void* program, const Block& block) {
  check_program<P>();
  using Runner = cpu::BlockRunner<P, Isa, std::make_integer_sequence<int, field_count<P>>>;
  alignas(64) float waiting[std::max(1, Runner::kWaiting)];
  Runner(*static_cast<const P*>(program), block).run(waiting);
}

}  // namespace coda::detail
