// How the map over a stored matrix lowers the operands of a program: a lane's values in memory, reductions over lanes,
// and a port for every kind. For nvcc only; coda/hopper/map.h has the loop around it.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include "coda/hopper/warp.h"
#include "coda/program.h"

namespace coda::hopper::mapped {

constexpr int kMapRows = 4;  // rows of a step, and the fewest lanes of a segment: see reduce_rows
constexpr int kMapWarps = 8;
constexpr int kChunk = 128;  // columns of the accumulators that a warp has at a time

/// How a lane sees a row. kItems: accumulators or pairs that it holds.
template <bool kPairs_, bool kAligned_, bool kOneChunk_>
struct LaneShape {
  static constexpr bool kPairs = kPairs_;
  static constexpr bool kAligned = kAligned_;  // every run of a lane's values is one vector in memory, or past the end
  static constexpr bool kOneChunk = kOneChunk_;  // a warp stays in one chunk of columns
  static constexpr int kItems = kPairs ? 2 : 4;
  static constexpr int kRows = kAligned && kOneChunk ? kMapRows : 1;
  /// A lane has all of its columns or none.
  static constexpr bool kWhole = kPairs || kAligned;
};

/// Where a lane stands in a row. Items are numbered as the tiles hold them: a column, or a pair of columns.
struct Lane {
  int64_t first;   // its first item, which may lie past the end of the row
  int64_t in_row;  // the same, or an item of the row that stands in for it
  int valid;       // of its items
  int64_t chunk;
  bool last_chunk;  // of the row
};

/// The column of item number i where pairs are packed: the first of a pair, its partner 8 further on.
template <bool kPairs>
__device__ __forceinline__ int64_t column_of(int64_t i) {
  return kPairs ? i + (i & ~int64_t{7}) : i;
}

// ---- memory ----------------------------------------------------------------------------------------------------

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<4> {
  using type = uint32_t;
};
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<16> {
  using type = uint4;
};

/// n neighbouring values as they lie in memory.
template <class T, int n, bool kAligned>
struct Run {
  T value[n];
  /// The first valid ones; the others repeat the first.
  __device__ __forceinline__ void load(const T* p, int valid) {
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = p[i < valid ? i : 0];
  }
  __device__ __forceinline__ float operator[](int i) const {
    return static_cast<float>(value[i]);
  }
};
template <int n>
struct Run<float, n, true> {
  float value[n];
  __device__ __forceinline__ void load(const float* p, int) {
    const auto v = *reinterpret_cast<const typename VectorOf<4 * n>::type*>(p);
    value[0] = __uint_as_float(v.x);
    value[1] = __uint_as_float(v.y);
    if constexpr (n == 4) {
      value[2] = __uint_as_float(v.z);
      value[3] = __uint_as_float(v.w);
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return value[i]; }
};
template <int n>
struct Run<bf16, n, true> {
  uint32_t word[n / 2];
  __device__ __forceinline__ void load(const bf16* p, int) {
    const auto v = *reinterpret_cast<const typename VectorOf<2 * n>::type*>(p);
    if constexpr (n == 2) {
      word[0] = v;
    } else {
      word[0] = v.x;
      word[1] = v.y;
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
  }
};

template <bool kAligned, class T, int n>
__device__ __forceinline__ void store_run(T* p, const float (&x)[n], int valid) {
  constexpr bool kHalf = std::is_same_v<T, bf16>;
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i < valid) {
        if constexpr (kHalf)
          p[i].bits = static_cast<uint16_t>(pack_bf16(x[i], 0.f));
        else
          p[i] = x[i];
      }
  } else if (valid > 0) {
    if constexpr (kHalf && n == 2)
      *reinterpret_cast<uint32_t*>(p) = pack_bf16(x[0], x[1]);
    else if constexpr (kHalf)
      store_words(p, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    else if constexpr (n == 2)
      store_words(p, __float_as_uint(x[0]), __float_as_uint(x[1]));
    else
      store_words(p, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
}

/// A lane's items of a row of memory: a value each, or packed pairs.
template <class T, class G, bool kPacked>
struct Items {
  Run<T, G::kItems, G::kAligned> run[kPacked ? 2 : 1];

  __device__ __forceinline__ void load(const T* row, const Lane& lane) {
    const T* p = row + column_of<kPacked>(lane.in_row);
    const int valid = lane.valid;
    run[0].load(p, valid);
    if constexpr (kPacked) run[1].load(p + 8, valid);
  }
  __device__ __forceinline__ auto operator[](int k) const {
    if constexpr (kPacked)
      return Pair<float>{run[0][k], run[1][k]};
    else
      return run[0][k];
  }
};

/// What a program has given for a lane's items.
template <class G, bool kPacked>
struct Given {
  float value[kPacked ? 2 : 1][G::kItems];

  __device__ __forceinline__ void put(int k, float x) { value[0][k] = x; }
  __device__ __forceinline__ void put(int k, Pair<float> x) {
    value[0][k] = x.first;
    value[1][k] = x.second;
  }
  __device__ __forceinline__ auto operator[](int k) const {
    if constexpr (kPacked)
      return Pair<float>{value[0][k], value[1][k]};
    else
      return value[0][k];
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, const Lane& lane) const {
    T* p = row + column_of<kPacked>(lane.first);
    store_run<G::kAligned>(p, value[0], lane.valid);
    if constexpr (kPacked) store_run<G::kAligned>(p + 8, value[1], lane.valid);
  }
};

// ---- reductions over lanes ----------------------------------------------------------------------------------------------

template <int kWidth>
constexpr int segment_lanes() {
  static_assert(kWidth == 16 || kWidth == 32 || kWidth == 64 || kWidth % kChunk == 0,
                "on the GPU the width of a row reduction is 16, 32, 64, 128 or a multiple of 128 columns");
  return kWidth < kChunk ? kWidth / 4 : 32;
}

/// Combines one value per row over each segment of kLanes lanes. Of four rows, lane l gets that of row l % 4: halving
/// the rows with the first two exchanges takes 6 shuffles where rows one by one take 20. Of one row every lane gets it.
template <class Op, int kLanes, int R>
__device__ __forceinline__ float reduce_rows(const float (&v)[R]) {
  static_assert(R == 1 || R == 4);
  const unsigned lane = threadIdx.x % 32;
  const auto exchange = [](bool upper, float a, float b, int distance) {
    const float other = __shfl_xor_sync(kWholeWarp, upper ? a : b, distance);
    return Op::combine(upper ? b : a, other);
  };
  float x;
  if constexpr (R == 4) {
    const float low = exchange(lane & 1, v[0], v[1], 1), high = exchange(lane & 1, v[2], v[3], 1);
    x = exchange(lane & 2, low, high, 2);
  } else {
    x = Op::combine(v[0], __shfl_xor_sync(kWholeWarp, v[0], 1));
    x = Op::combine(x, __shfl_xor_sync(kWholeWarp, x, 2));
  }
#pragma unroll
  for (int distance = 4; distance < kLanes; distance *= 2) x = Op::combine(x, __shfl_xor_sync(kWholeWarp, x, distance));
  return x;
}
/// What reduce_rows gave for row r.
template <int R>
__device__ __forceinline__ float of_row(float reduced, int r) {
  return R == 1 ? reduced : __shfl_sync(kWholeWarp, reduced, r, 4);
}

/// Whether values past the end of the row are left out one by one. Otherwise a lane's sum is, as a whole.
template <int kWidth, class G>
inline constexpr bool kMaskEach = !G::kWhole || (kWidth > kChunk);
template <class Op, bool kMask>
__device__ __forceinline__ float in_row(float x, bool valid) {
  return kMask && !valid ? Op::identity : x;
}

/// Whether lane is the one that stores what reduce_rows gave it, for a slot of kWidth columns.
template <int kWidth, int R, class G>
__device__ __forceinline__ bool stores_slot(const Lane& lane, int64_t cols, int64_t* slot) {
  *slot = column_of<G::kPairs>(lane.first) / kWidth;
  return threadIdx.x % segment_lanes<kWidth>() < R && *slot * kWidth < cols;
}
/// Whether a slot of kWidth columns ends with the chunk.
template <int kWidth>
__device__ __forceinline__ bool slot_ends(const Lane& lane) {
  return kWidth <= kChunk || lane.last_chunk || (lane.chunk + 1) * kChunk % kWidth == 0;
}

// ---- one port per field ---------------------------------------------------------------------------------------------------

/// The rows and columns of the matrix.
struct MapSize {
  int64_t rows, cols;
};

/// A port keeps what belongs to the lane's columns; its Rows<R>, what belongs to R rows of a step. fetch() comes before
/// value(), put() after it, finish() when every item of the rows has been put.
struct NoPort {
  __device__ __forceinline__ void begin(const Lane&) {}
};
struct NoRows {
  template <class Port>
  __device__ __forceinline__ void fetch(const Port&, int64_t /*row*/, const Lane&) {}
  template <class Port>
  __device__ __forceinline__ void finish(Port&, int64_t /*row*/, const Lane&, const MapSize&) {}
};

/// Kind K in direction D, activations of type E. Built from the caller's view of the field.
template <class K, Direction D, class E, class G>
struct Port;

/// One value wherever it is read.
template <class T>
struct ConstantPort : NoPort {
  T constant;
  __device__ explicit ConstantPort(const T& x) : constant(x) {}
  template <int R>
  struct Rows : NoRows {
    __device__ __forceinline__ T value(const ConstantPort& port, int, int) const { return port.constant; }
  };
};
template <Direction D, class E, class G>
struct Port<Off, D, E, G> : NoPort {
  __device__ explicit Port(Nothing) {}
  template <int R>
  struct Rows : NoRows {
    __device__ __forceinline__ Nothing value(const Port&, int, int) const { return {}; }
    __device__ __forceinline__ void put(const Lane&, int, int, const Nothing&) {}
  };
};
template <class T, class E, class G>
struct Port<Scalar<T>, Direction::in, E, G> : ConstantPort<float> {
  __device__ explicit Port(T x) : ConstantPort<float>(static_cast<float>(x)) {}
};
template <class T, class E, class G>
struct Port<DeviceScalar<T>, Direction::in, E, G> : ConstantPort<float> {
  __device__ explicit Port(const T* p) : ConstantPort<float>(static_cast<float>(*p)) {}
};

template <class T, class E, class G>
struct Port<PerRow<T>, Direction::in, E, G> : NoPort {
  const T* data;
  __device__ explicit Port(Vector<const T> v) : data(v.data) {}
  template <int R>
  struct Rows : NoRows {
    T at[R];
    __device__ __forceinline__ void fetch(const Port& port, int64_t row, const Lane&) {
#pragma unroll
      for (int r = 0; r < R; ++r) at[r] = port.data[row + r];
    }
    __device__ __forceinline__ auto value(const Port&, int r, int) const {
      return static_cast<typename detail::StoredAs<T, float>::type>(at[r]);
    }
  };
};

template <class T, class E, class G>
struct Port<PerCol<T>, Direction::in, E, G> : NoPort {
  const T* data;
  Items<T, G, G::kPairs> items;
  __device__ explicit Port(Vector<const T> v) : data(v.data) {}
  __device__ __forceinline__ void begin(const Lane& lane) { items.load(data, lane); }
  template <int R>
  struct Rows : NoRows {
    __device__ __forceinline__ auto value(const Port& port, int, int k) const { return port.items[k]; }
  };
};
template <class T, class E, class G>
struct Port<PerPair<T>, Direction::in, E, G> : NoPort {
  static_assert(G::kPairs);
  Vector<const T> of;
  Items<T, G, false> items;
  __device__ explicit Port(Vector<const T> v) : of(v) {}
  __device__ __forceinline__ void begin(const Lane& lane) {
    Lane in_period = lane;  // 8 divides the period: a lane's two pairs do not run over its end
    in_period.in_row = lane.in_row % of.size;
    items.load(of.data, in_period);
  }
  template <int R>
  struct Rows : NoRows {
    __device__ __forceinline__ float value(const Port& port, int, int k) const { return port.items[k]; }
  };
};

template <class T, class G, bool kPacked>
struct TileIn : NoPort {
  Matrix<const T> matrix;
  __device__ explicit TileIn(Matrix<const T> m) : matrix(m) {}
  template <int R>
  struct Rows : NoRows {
    Items<T, G, kPacked> items[R];
    __device__ __forceinline__ void fetch(const TileIn& port, int64_t row, const Lane& lane) {
#pragma unroll
      for (int r = 0; r < R; ++r) items[r].load(port.matrix.row(row + r), lane);
    }
    __device__ __forceinline__ auto value(const TileIn&, int r, int k) const {
      return items[r][k];
    }
  };
};
template <class T, class G, bool kPacked>
struct TileOut : NoPort {
  Matrix<T> matrix;
  __device__ explicit TileOut(Matrix<T> m) : matrix(m) {}
  template <int R>
  struct Rows : NoRows {
    Given<G, kPacked> given[R];
    template <class V>
    __device__ __forceinline__ void put(const Lane&, int r, int k, V x) {
      given[r].put(k, x);
    }
    __device__ __forceinline__ void finish(TileOut& port, int64_t row, const Lane& lane, const MapSize&) {
#pragma unroll
      for (int r = 0; r < R; ++r) given[r].store(port.matrix.row(row + r), lane);
    }
  };
};
// clang-format off
template <class T, class E, class G>
struct Port<Tile<T>, Direction::in, E, G> : TileIn<detail::element_t<T, E>, G, G::kPairs> {
  using TileIn<detail::element_t<T, E>, G, G::kPairs>::TileIn;
};
template <class T, class E, class G>
struct Port<HalfTile<T>, Direction::in, E, G> : TileIn<detail::element_t<T, E>, G, false> {
  using TileIn<detail::element_t<T, E>, G, false>::TileIn;
};
template <class T, class E, class G>
struct Port<DoubleTile<T>, Direction::in, E, G> : TileIn<detail::element_t<T, E>, G, true> {
  using TileIn<detail::element_t<T, E>, G, true>::TileIn;
};
template <class T, class E, class G>
struct Port<Tile<T>, Direction::out, E, G> : TileOut<detail::element_t<T, E>, G, G::kPairs> {
  using TileOut<detail::element_t<T, E>, G, G::kPairs>::TileOut;
};
template <class T, class E, class G>
struct Port<HalfTile<T>, Direction::out, E, G> : TileOut<detail::element_t<T, E>, G, false> {
  using TileOut<detail::element_t<T, E>, G, false>::TileOut;
};
template <class T, class E, class G>
struct Port<DoubleTile<T>, Direction::out, E, G> : TileOut<detail::element_t<T, E>, G, true> {
  using TileOut<detail::element_t<T, E>, G, true>::TileOut;
};
// clang-format on
template <class T, class E, class G>
struct Port<Accumulate<T>, Direction::out, E, G> : TileOut<detail::element_t<T, E>, G, G::kPairs> {
  using Base = TileOut<detail::element_t<T, E>, G, G::kPairs>;
  using Base::Base;
  template <int R>
  struct Rows : Base::template Rows<R> {
    Items<detail::element_t<T, E>, G, G::kPairs> before[R];
    __device__ __forceinline__ void fetch(const Port& port, int64_t row, const Lane& lane) {
#pragma unroll
      for (int r = 0; r < R; ++r) before[r].load(port.matrix.row(row + r), lane);
    }
    template <class V>
    __device__ __forceinline__ void put(const Lane&, int r, int k, V x) {
      this->given[r].put(k, before[r][k] + x);
    }
  };
};

template <int kWidth, class G>
struct RowPartialIn : NoPort {
  Matrix<const float> partial;  // [slots, M]
  __device__ explicit RowPartialIn(Matrix<const float> m) : partial(m) {}
  template <int R>
  struct Rows : NoRows {
    float at[R];
    __device__ __forceinline__ void fetch(const RowPartialIn& port, int64_t row, const Lane& lane) {
      const float* slot = port.partial.row(column_of<G::kPairs>(lane.in_row) / kWidth) + row;
#pragma unroll
      for (int r = 0; r < R; ++r) at[r] = slot[r];
    }
    __device__ __forceinline__ float value(const RowPartialIn&, int r, int) const {
      return at[r];
    }
  };
};
/// Running reductions of R rows, each lane's part.
template <class Op, int kWidth, int R, class G>
struct RunningRows {
  float running[R];
  __device__ __forceinline__ RunningRows() { reset(); }
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < R; ++r) running[r] = Op::identity;
  }
  __device__ __forceinline__ void take(const Lane& lane, int r, int k, float x) {
    running[r] = Op::combine(running[r], in_row<Op, kMaskEach<kWidth, G>>(x, k < lane.valid));
  }
  /// As reduce_rows.
  __device__ __forceinline__ float reduce(const Lane& lane) {
#pragma unroll
    for (int r = 0; r < R; ++r) running[r] = in_row<Op, !kMaskEach<kWidth, G>>(running[r], lane.valid > 0);
    const float total = reduce_rows<Op, segment_lanes<kWidth>()>(running);
    reset();
    return total;
  }
};
template <class Op, int kWidth, class G>
struct RowPartialOut : NoPort {
  Matrix<float> out;  // [slots, M]
  __device__ explicit RowPartialOut(Matrix<float> m) : out(m) {}
  template <int R>
  struct Rows : NoRows {
    RunningRows<Op, kWidth, R, G> rows;
    template <class C>
    __device__ __forceinline__ void put(const Lane& lane, int r, int k, const C& contribution) {
      rows.take(lane, r, k, contribution.value);
    }
    __device__ __forceinline__ void finish(RowPartialOut& port, int64_t row, const Lane& lane, const MapSize& size) {
      if (!slot_ends<kWidth>(lane)) return;
      const float total = rows.reduce(lane);
      int64_t slot;
      if (stores_slot<kWidth, R, G>(lane, size.cols, &slot)) port.out(slot, row + threadIdx.x % R) = total;
    }
  };
};
/// What measure() gathers over a group of columns, then a value for later passes.
template <class Op, int kWidth, class G>
struct LocalPort : NoPort {
  __device__ explicit LocalPort(Nothing) {}
  template <int R>
  struct Rows : NoRows {
    RunningRows<Op, kWidth, R, G> rows;
    float of_group[R];
    template <class C>
    __device__ __forceinline__ void gather(const Lane& lane, int r, int k, const C& contribution) {
      rows.take(lane, r, k, contribution.value);
    }
    __device__ __forceinline__ void end_group(const Lane& lane) {
      const float total = rows.reduce(lane);
#pragma unroll
      for (int r = 0; r < R; ++r) of_group[r] = of_row<R>(total, r);
    }
    __device__ __forceinline__ float value(const LocalPort&, int r, int) const {
      return of_group[r];
    }
  };
};
// clang-format off
template <class T, int W, class E, class G>
struct Port<RowSum<T, W>, Direction::in, E, G> : RowPartialIn<W, G> {
  using RowPartialIn<W, G>::RowPartialIn;
};
template <class T, int W, class E, class G>
struct Port<RowMax<T, W>, Direction::in, E, G> : RowPartialIn<W, G> {
  using RowPartialIn<W, G>::RowPartialIn;
};
template <class T, int W, class E, class G>
struct Port<RowSum<T, W>, Direction::out, E, G> : RowPartialOut<AddUp, W, G> {
  using RowPartialOut<AddUp, W, G>::RowPartialOut;
};
template <class T, int W, class E, class G>
struct Port<RowMax<T, W>, Direction::out, E, G> : RowPartialOut<Largest, W, G> {
  using RowPartialOut<Largest, W, G>::RowPartialOut;
};
template <class T, int W, class E, class G>
struct Port<RowSum<T, W>, Direction::local, E, G> : LocalPort<AddUp, W, G> {
  using LocalPort<AddUp, W, G>::LocalPort;
};
template <class T, int W, class E, class G>
struct Port<RowMax<T, W>, Direction::local, E, G> : LocalPort<Largest, W, G> {
  using LocalPort<Largest, W, G>::LocalPort;
};
// clang-format on

/// The maximum of 128 columns first, then one exp per value; slots of more columns combine such states.
template <int W, class E, class G>
struct Port<RowLogSumExp<W>, Direction::out, E, G> : NoPort {
  static constexpr float kNone = Largest::identity;
  Matrix<MaxSum> out;  // [slots, M]
  __device__ explicit Port(Matrix<MaxSum> m) : out(m) {}

  static __device__ __forceinline__ MaxSum merge(MaxSum a, MaxSum b) {
    const float top = max(a.max, b.max), shift = finite_shift(top);
    return {top, a.sum * exp(a.max - shift) + b.sum * exp(b.max - shift)};
  }
  /// With everything at -inf, exp(-inf - -inf) would be NaN, and the sum is zero.
  static __device__ __forceinline__ float finite_shift(float top) { return top == kNone ? 0.f : top; }

  template <int R>
  struct Rows : NoRows {
    static constexpr int kValues = G::kPairs ? 2 * G::kItems : G::kItems;
    float waiting[R][kValues];
    MaxSum running{kNone, 0};  // of the row that reduce_rows leaves in this lane
    __device__ __forceinline__ void put(const Lane& lane, int r, int k, float x) {
      waiting[r][k] = in_row<Largest, !G::kWhole>(x, k < lane.valid);
    }
    __device__ __forceinline__ void put(const Lane& lane, int r, int k, Pair<float> x) {
      waiting[r][2 * k] = x.first;
      waiting[r][2 * k + 1] = x.second;
    }
    __device__ __forceinline__ void finish(Port& port, int64_t row, const Lane& lane, const MapSize& size) {
      constexpr int kLanes = segment_lanes<W>();
      float part[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        part[r] = waiting[r][0];
#pragma unroll
        for (int i = 1; i < kValues; ++i) part[r] = max(part[r], waiting[r][i]);
        part[r] = in_row<Largest, G::kWhole>(part[r], lane.valid > 0);
      }
      const float top = reduce_rows<Largest, kLanes>(part);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float shift = finite_shift(of_row<R>(top, r));
        part[r] = exp(waiting[r][0] - shift);
#pragma unroll
        for (int i = 1; i < kValues; ++i) part[r] = part[r] + exp(waiting[r][i] - shift);
        part[r] = in_row<AddUp, G::kWhole>(part[r], lane.valid > 0);
      }
      MaxSum state{top, reduce_rows<AddUp, kLanes>(part)};
      if constexpr (W > kChunk) {
        state = running = merge(running, state);
        if (!slot_ends<W>(lane)) return;
        running = {kNone, 0};
      }
      int64_t slot;
      if (stores_slot<W, R, G>(lane, size.cols, &slot)) port.out(slot, row + threadIdx.x % R) = state;
    }
  };
};

/// A strip begins with a slot, so a slot's rows come one after the other. The running sum is in registers or, where the
/// warp goes from chunk to chunk, in the output itself.
template <class T, int H, class E, class G>
struct Port<ColSum<T, H>, Direction::out, E, G> : NoPort {
  static_assert(std::is_same_v<T, float>, "partial reductions are stored in float");
  Matrix<float> out;  // [slots, N]
  Given<G, G::kPairs> sum;
  __device__ explicit Port(Matrix<float> m) : out(m) { reset(); }
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < G::kItems; ++i) {
      sum.value[0][i] = 0;
      if constexpr (G::kPairs) sum.value[1][i] = 0;
    }
  }
  template <int R>
  struct Rows : NoRows {
    Given<G, G::kPairs> given[R];
    template <class V>
    __device__ __forceinline__ void put(const Lane&, int r, int k, V x) {
      given[r].put(k, x);
    }
    __device__ __forceinline__ void finish(Port& port, int64_t row, const Lane& lane, const MapSize& size) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t i = row + r;
        if constexpr (!G::kOneChunk) {
          if (i % H != 0) {
            Items<float, G, G::kPairs> before;
            before.load(port.out.row(i / H), lane);
#pragma unroll
            for (int k = 0; k < G::kItems; ++k) given[r].put(k, before[k] + given[r][k]);
          }
          given[r].store(port.out.row(i / H), lane);
        } else {
#pragma unroll
          for (int k = 0; k < G::kItems; ++k) port.sum.put(k, port.sum[k] + given[r][k]);
          if (H % R == 0 && r != R - 1) continue;  // steps begin at multiples of R then: no slot ends inside
          if ((i + 1) % H == 0 || i + 1 == size.rows) {
            port.sum.store(port.out.row(i / H), lane);
            port.reset();
          }
        }
      }
    }
  };
};

}  // namespace coda::hopper::mapped
