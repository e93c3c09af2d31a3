// A program over a stored matrix, with plain loads and stores: any alignment, any shape. For nvcc only.
//
// A warp owns a strip of rows of one chunk of 128 columns (of as many chunks as the widest row reduction has). A lane holds
// four neighbouring columns, or two neighbouring pairs, of kRows rows at a time: all that these rows read is on its way before
// any of it is used, and nothing of them is stored before all of it has been read, which is what in-place tiles need. What
// belongs to a column (PerCol, PerPair, column sums) stays in registers for the strip.
//
// Sums are added in an order that depends on the program and the shape only: columns in a lane, then lanes as a balanced tree,
// then chunks; rows of a column sum one after the other.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "coda/gpu.h"

namespace coda::hopper::mapped {

constexpr int kMapRows = 4;  // rows of a step; also the fewest lanes of a segment, see reduce_rows
constexpr int kMapWarps = 8;
constexpr int kChunk = 128;  // columns of the accumulators that a warp has at a time
constexpr unsigned kAllLanes = 0xffffffffu;

/// How a lane sees a row. kItems: accumulators or pairs that it holds.
template <bool kPairs_, bool kAligned_, bool kOneChunk_>
struct LaneShape {
  static constexpr bool kPairs = kPairs_;
  static constexpr bool kAligned = kAligned_;  // every run of a lane's values is one vector in memory, or past the end
  static constexpr bool kOneChunk = kOneChunk_;  // a warp stays in one chunk of columns
  static constexpr int kItems = kPairs ? 2 : 4;
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

// ---- memory ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

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
      *reinterpret_cast<uint2*>(p) = uint2{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
    else if constexpr (n == 2)
      *reinterpret_cast<float2*>(p) = float2{x[0], x[1]};
    else
      *reinterpret_cast<float4*>(p) = float4{x[0], x[1], x[2], x[3]};
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

struct AddUp {
  static constexpr float identity = 0;
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};
struct Largest {
  static constexpr float identity = -std::numeric_limits<float>::infinity();
  static __device__ __forceinline__ float combine(float a, float b) { return max(a, b); }
};

template <int kWidth>
constexpr int segment_lanes() {
  static_assert(kWidth == 16 || kWidth == 32 || kWidth == 64 || kWidth % kChunk == 0,
                "on the GPU the width of a row reduction is 16, 32, 64, 128 or a multiple of 128 columns");
  return kWidth < kChunk ? kWidth / 4 : 32;
}

/// Combines one value per row over each segment of kLanes lanes. Of four rows, lane l gets that of row l % 4: halving the rows
/// with the first two exchanges takes 6 shuffles where rows one by one take 20. Of one row every lane gets it.
template <class Op, int kLanes, int R>
__device__ __forceinline__ float reduce_rows(const float (&v)[R]) {
  static_assert(R == 1 || R == 4);
  const unsigned lane = threadIdx.x % 32;
  const auto exchange = [](bool upper, float a, float b, int distance) {
    const float other = __shfl_xor_sync(kAllLanes, upper ? a : b, distance);
    return Op::combine(upper ? b : a, other);
  };
  float x;
  if constexpr (R == 4) {
    const float low = exchange(lane & 1, v[0], v[1], 1), high = exchange(lane & 1, v[2], v[3], 1);
    x = exchange(lane & 2, low, high, 2);
  } else {
    x = Op::combine(v[0], __shfl_xor_sync(kAllLanes, v[0], 1));
    x = Op::combine(x, __shfl_xor_sync(kAllLanes, x, 2));
  }
#pragma unroll
  for (int distance = 4; distance < kLanes; distance *= 2) x = Op::combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}
/// What reduce_rows gave for row r.
template <int R>
__device__ __forceinline__ float of_row(float reduced, int r) {
  return R == 1 ? reduced : __shfl_sync(kAllLanes, reduced, r, 4);
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

/// A port keeps what belongs to the lane's columns; its Rows<R>, what belongs to R rows of a step. fetch() comes before value(),
/// put() after it, finish() when every item of the rows has been put.
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

/// A strip begins with a slot, so a slot's rows come one after the other. The running sum is in registers or, where the warp
/// goes from chunk to chunk, in the output itself.
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

// ---- the loop ---------------------------------------------------------------------------------------------------------------

struct MapArguments {
  const void* x;
  int64_t stride;
  bool x_is_float;  // looked at where the kernel takes either
  MapSize size;
  int64_t strip_rows;  // a multiple of the heights of the program's column sums
};

/// The stored matrix in place of accumulators. X: float, bf16, or void for either, element by element.
template <class X, class G>
struct Accumulators {
  Items<X, G, G::kPairs> items;
  __device__ __forceinline__ void load(const MapArguments& of, int64_t row, const Lane& lane) {
    items.load(static_cast<const X*>(of.x) + row * of.stride, lane);
  }
  __device__ __forceinline__ auto operator[](int k) const { return items[k]; }
};
template <class G>
struct Accumulators<void, G> {
  Given<G, G::kPairs> values;
  __device__ __forceinline__ void load(const MapArguments& of, int64_t row, const Lane& lane) {
    if (of.x_is_float)
      take<float>(of, row, lane);
    else
      take<bf16>(of, row, lane);
  }
  template <class T>
  __device__ __forceinline__ void take(const MapArguments& of, int64_t row, const Lane& lane) {
    Accumulators<T, G> stored;
    stored.load(of, row, lane);
#pragma unroll
    for (int k = 0; k < G::kItems; ++k) values.put(k, stored[k]);
  }
  __device__ __forceinline__ auto operator[](int k) const {
    return values[k];
  }
};

template <class Info, class E, class G>
struct PortFor {
  using type = Port<typename Info::Kind_, Info::direction, E, G>;
};
template <class Info, class E, class G>
requires std::is_void_v<typename Info::Kind_>
struct PortFor<Info, E, G> {
  using type = ConstantPort<typename Info::Element>;
};

/// The N-th of several values.
template <int N, class T>
struct Slot {
  T value;
};

template <class P>
constexpr int widest_group(int least) {
  int group = least;
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((group = detail::group_columns<P, I>() > 0 ? detail::least_common_multiple(group, detail::group_columns<P, I>())
                                                : group),
     ...);
  }
  (std::make_integer_sequence<int, detail::field_count<P>>{});
  return group;
}

template <class P, class X, bool kAligned, class Numbers>
class MapRunner;

template <class P, class X, bool kAligned, int... I>
class MapRunner<P, X, kAligned, std::integer_sequence<int, I...>> {
 public:
  static constexpr int kFields = sizeof...(I);
  static constexpr int kGroupChunks = widest_group<P>(kChunk) / kChunk;  // that a warp goes through

  __device__ MapRunner(const P& program, const MapArguments& arguments)
      : arguments_(arguments), ports_(detail::with_fields<kFields>(program, [](const auto&... field) {
          return Ports{Slot<I, PortOf<I>>{PortOf<I>(field)}...};
        })) {}

  /// Rows [row, row + strip_rows) of chunks [chunk, chunk + kGroupChunks), as far as there are any.
  __device__ void run(int64_t row, int64_t chunk) {
    const int64_t left = arguments_.size.rows - row;
    const int64_t end = row + (left < arguments_.strip_rows ? left : arguments_.strip_rows);
    if constexpr (kGroupChunks == 1) enter(chunk);
    for (; row + kMapRows <= end; row += kMapRows) step<kMapRows>(row, chunk);
    for (; row < end; ++row) step<1>(row, chunk);
  }

 private:
  static constexpr bool kPairs = detail::takes_pair<P>;
  using G = LaneShape<kPairs, kAligned, kGroupChunks == 1>;
  using E = detail::element_of<P>;
  using V = detail::accumulator_t<P, float>;
  template <int N>
  using Info = detail::field_info<P, N>;
  template <int N>
  using PortOf = typename PortFor<Info<N>, E, G>::type;
  template <int N>
  static constexpr bool is_local = Info<N>::direction == Direction::local;
  static constexpr int kPasses = detail::measure_passes<P, V>();
  /// Columns that measure() sees together; 0 without locals.
  static constexpr int local_group() {
    int group = 0;
    ((group = is_local<I> ? Info<I>::extent : group), ...);
    return group;
  }
  static constexpr int kLocalChunks = local_group() > kChunk ? local_group() / kChunk : 1;

  struct Ports : Slot<I, PortOf<I>>... {};
  template <int R>
  struct Rows : Slot<I, typename PortOf<I>::template Rows<R>>... {
    V acc[R][G::kItems];
  };
  template <int N, class T>
  static __device__ __forceinline__ T& at(Slot<N, T>& slot) {
    return slot.value;
  }

  __device__ __forceinline__ void enter(int64_t chunk) {
    const int64_t items = kPairs ? arguments_.size.cols / 2 : arguments_.size.cols;
    const int64_t begin = chunk * 32 * G::kItems;
    lane_.first = begin + threadIdx.x % 32 * G::kItems;
    const int64_t left = items - lane_.first;
    lane_.valid = left <= 0 ? 0 : left < G::kItems ? static_cast<int>(left) : G::kItems;
    lane_.in_row = left > 0 ? lane_.first : begin;
    lane_.chunk = chunk;
    lane_.last_chunk = (chunk + 1) * kChunk >= arguments_.size.cols;
    (at<I>(ports_).begin(lane_), ...);
  }

  template <int R>
  __device__ __forceinline__ void fetch(Rows<R>& rows, int64_t row, int64_t chunk) {
    if constexpr (kGroupChunks > 1) enter(chunk);
    Accumulators<X, G> stored[R];
#pragma unroll
    for (int r = 0; r < R; ++r) stored[r].load(arguments_, row + r, lane_);
    (at<I>(rows).fetch(at<I>(ports_), row, lane_), ...);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int k = 0; k < G::kItems; ++k) rows.acc[r][k] = stored[r][k];
  }

  template <int R>
  __device__ __forceinline__ void step(int64_t row, int64_t first_chunk) {
    Rows<R> rows;
    if constexpr (kGroupChunks == 1) {
      fetch(rows, row, first_chunk);
      measure_all<0>(rows, row);
      apply(rows, row);
    } else {
      const int64_t chunks = (arguments_.size.cols + kChunk - 1) / kChunk;
      const int64_t end = first_chunk + kGroupChunks < chunks ? first_chunk + kGroupChunks : chunks;
#pragma unroll 1
      for (int64_t begin = first_chunk; begin < end; begin += kLocalChunks) {
        const int64_t local_end = begin + kLocalChunks < end ? begin + kLocalChunks : end;
        if constexpr (kLocalChunks > 1) measure_groups<0>(rows, row, begin, local_end);
#pragma unroll 1
        for (int64_t chunk = begin; chunk < local_end; ++chunk) {
          fetch(rows, row, chunk);
          if constexpr (kLocalChunks > 1)
            measure_again<kPasses>(rows, row);
          else
            measure_all<0>(rows, row);
          apply(rows, row);
        }
      }
    }
  }

  /// Every pass over accumulators that stay in registers.
  template <int kPass, int R>
  __device__ __forceinline__ void measure_all(Rows<R>& rows, int64_t row) {
    if constexpr (kPass < kPasses) {
      measure<kPass, true>(rows, row);
      (end_group<I, kPass>(rows), ...);
      measure_all<kPass + 1>(rows, row);
    }
  }
  /// A group of several chunks: every pass reads it again and goes through the earlier ones to have its accumulators.
  template <int kPass, int R>
  __device__ __forceinline__ void measure_groups(Rows<R>& rows, int64_t row, int64_t begin, int64_t end) {
    if constexpr (kPass < kPasses) {
#pragma unroll 1
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        fetch(rows, row, chunk);
        measure_again<kPass>(rows, row);
        measure<kPass, true>(rows, row);
      }
      (end_group<I, kPass>(rows), ...);
      measure_groups<kPass + 1>(rows, row, begin, end);
    }
  }
  /// Passes before kPass for what they do to the accumulators only.
  template <int kPass, int R>
  __device__ __forceinline__ void measure_again(Rows<R>& rows, int64_t row) {
    if constexpr (kPass > 0) {
      measure_again<kPass - 1>(rows, row);
      measure<kPass - 1, false>(rows, row);
    }
  }

  /// The value that field N holds before pass kPass of measure(), or before the program for kPass = kPasses.
  template <int N, class S, int kPass, int R>
  __device__ __forceinline__ auto initial(Rows<R>& rows, int r, int k) {
    using FieldType = std::remove_cvref_t<decltype(detail::field<kFields, N>(std::declval<detail::on_side<P, S>&>()))>;
    if constexpr (Info<N>::direction == Direction::in || (is_local<N> && Info<N>::pass < kPass))
      return FieldType(at<N>(rows).value(at<N>(ports_), r, k));
    else
      return FieldType{};
  }
  template <int kPass, bool kGather, int R>
  __device__ __forceinline__ void measure(Rows<R>& rows, int64_t) {
    using Measure = Measuring<V, E, kPass>;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int k = 0; k < G::kItems; ++k) {
        detail::on_side<P, Measure> program{initial<I, Measure, kPass>(rows, r, k)...};
        if constexpr (detail::has_single_measure<P, V>)
          program.measure(rows.acc[r][k]);
        else
          program.measure(Pass<kPass>{}, rows.acc[r][k]);
        if constexpr (kGather) (gather<I, kPass>(rows, r, k, detail::field<kFields, I>(program)), ...);
      }
  }
  template <int N, int kPass, int R, class F>
  __device__ __forceinline__ void gather(Rows<R>& rows, int r, int k, const F& value) {
    if constexpr (is_local<N> && Info<N>::pass == kPass) at<N>(rows).gather(lane_, r, k, value);
  }
  template <int N, int kPass, int R>
  __device__ __forceinline__ void end_group(Rows<R>& rows) {
    if constexpr (is_local<N> && Info<N>::pass == kPass) at<N>(rows).end_group(lane_);
  }

  template <int R>
  __device__ __forceinline__ void apply(Rows<R>& rows, int64_t row) {
    using Side = Registers<V, E>;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int k = 0; k < G::kItems; ++k) {
        detail::on_side<P, Side> program{initial<I, Side, kPasses>(rows, r, k)...};
        const V acc = rows.acc[r][k];
        if constexpr (detail::takes_at<P>)
          program(acc,
                  At<Side>{static_cast<int32_t>(row + r), static_cast<int32_t>(column_of<kPairs>(lane_.first + k))});
        else
          program(acc);
        (put<I>(rows, r, k, detail::field<kFields, I>(program)), ...);
      }
    (at<I>(rows).finish(at<I>(ports_), row, lane_, arguments_.size), ...);
  }
  template <int N, int R, class F>
  __device__ __forceinline__ void put(Rows<R>& rows, int r, int k, const F& value) {
    if constexpr (Info<N>::direction == Direction::out) at<N>(rows).put(lane_, r, k, value);
  }

  const MapArguments& arguments_;
  Ports ports_;
  Lane lane_;
};

template <class P, class X, bool kAligned>
__global__ void __launch_bounds__(32 * kMapWarps, 2)
    map_kernel(const __grid_constant__ P program, const __grid_constant__ MapArguments arguments) {
  using Runner = MapRunner<P, X, kAligned, std::make_integer_sequence<int, detail::field_count<P>>>;
  constexpr int64_t kGroup = Runner::kGroupChunks * kChunk;
  const int64_t groups = (arguments.size.cols + kGroup - 1) / kGroup;
  const int64_t warp = int64_t{blockIdx.x} * kMapWarps + threadIdx.x / 32;
  const int64_t row = warp / groups * arguments.strip_rows;
  if (row >= arguments.size.rows) return;
  Runner(program, arguments).run(row, warp % groups * Runner::kGroupChunks);
}

// ---- the launch -----------------------------------------------------------------------------------------------------------

/// Whether every run of items values that a lane takes from memory is one aligned vector.
inline bool in_vectors(const detail::HopperMap& map, bool pairs) {
  const int64_t items = pairs ? 2 : 4;
  const auto fits = [&](const void* data, int64_t stride, int64_t rows, ElementType element) {
    const int64_t bytes = items * (element == ElementType::bfloat16 ? 2 : 4);
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0 && (rows <= 1 || stride % items == 0);
  };
  if (map.x.depth % items != 0 || !fits(map.x.data, map.x.stride, map.x.rows, map.x.element)) return false;
  for (const detail::Operand& operand : map.operands) switch (operand.field.kind) {
      case Kind::per_col:
      case Kind::per_pair:
      case Kind::tile:
      case Kind::half_tile:
      case Kind::double_tile:
      case Kind::accumulate:
      case Kind::col_sum:
        if (!fits(operand.data, operand.stride, operand.rows, operand.field.element)) return false;
        break;
      default:  // read and written value by value
        break;
    }
  return true;
}

/// Starts program P over map.x. The caller has checked the operands and made the stream's device current. Returns a cudaError_t.
template <class P>
int launch_map(const detail::HopperMap& map) {
  detail::check_program<P>();
  const int64_t rows = map.x.rows, cols = map.x.depth;
  if (rows == 0 || cols == 0) return cudaSuccess;

  constexpr auto kNumbers = std::make_integer_sequence<int, detail::field_count<P>>{};
  constexpr int64_t kGroup = widest_group<P>(kChunk), kRowGroup = detail::row_group<P>(kNumbers);
  const int64_t groups = (cols + kGroup - 1) / kGroup;
  const auto strips = [&](int64_t strip_rows) { return (rows + strip_rows - 1) / strip_rows; };
  // Long strips read what belongs to a column less often; there must be enough of them to fill the GPU.
  const int64_t enough = int64_t{map.multiprocessors} * 64;
  int64_t strip_rows = kRowGroup == 1 ? kMapRows : kRowGroup;
  while (strip_rows < 64 && strips(2 * strip_rows) * groups >= enough) strip_rows *= 2;

  const MapArguments arguments{.x = map.x.data,
                               .stride = map.x.stride,
                               .x_is_float = map.x.element == ElementType::float32,
                               .size = {rows, cols},
                               .strip_rows = strip_rows};
  const P& program = *static_cast<const P*>(map.program);
  const auto blocks = static_cast<unsigned>((strips(strip_rows) * groups + kMapWarps - 1) / kMapWarps);
  const auto launch = [&](auto kernel) { kernel<<<blocks, 32 * kMapWarps, 0, map.stream>>>(program, arguments); };
  if (!in_vectors(map, detail::takes_pair<P>))
    launch(map_kernel<P, void, false>);
  else if (arguments.x_is_float)
    launch(map_kernel<P, float, true>);
  else
    launch(map_kernel<P, bf16, true>);
  return cudaPeekAtLastError();
}

}  // namespace coda::hopper::mapped
