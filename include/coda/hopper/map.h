// A program over a stored matrix, with plain loads and stores: any alignment, any shape. For nvcc only.
//
// A warp owns a strip of rows of one chunk of 128 columns (of as many chunks as the widest row reduction has). A lane
// holds four neighbouring columns, or two neighbouring pairs, of four rows at a time (of one where it goes element by
// element or from chunk to chunk, which takes more registers): all that these rows read is on its way before any of it
// is used, and nothing of them is stored before all of it has been read, which is what in-place tiles need. What
// belongs to a column (PerCol, PerPair, column sums) stays in registers for the strip.
//
// Sums are added in an order that depends on the program and the shape only: columns in a lane, then lanes as a
// balanced tree, then chunks; rows of a column sum one after the other.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "coda/gpu.h"
#include "coda/hopper/map_port.h"

namespace coda::hopper::mapped {

// ---- the loop ------------------------------------------------------------------------------------------------------

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
    if constexpr (G::kRows > 1)
      for (; row + G::kRows <= end; row += G::kRows) step<G::kRows>(row, chunk);
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

// ---- the launch ----------------------------------------------------------------------------------------------------

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

/// Starts program P over map.x. The caller has checked the operands and made the stream's device current. Returns a
/// cudaError_t.
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
  while (strip_rows < 32 && strips(2 * strip_rows) * groups >= enough) strip_rows *= 2;

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
  return cudaGetLastError();
}

}  // namespace coda::hopper::mapped
