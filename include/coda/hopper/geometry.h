// Where accumulators stand in a thread block of the Hopper engine.
//
// A warp group holds 64 rows of a slab as wgmma leaves them: warp w rows 16w … 16w + 15; of every unit of 16 columns a thread holds
// 8 accumulators, row r + 8h and column 8b + 2q + e with r = lane / 4, q = lane % 4 and h, b, e in {0, 1}. With partners in blocks of
// 8 columns both of a pair are the same thread's.
#pragma once
#include <cute/tensor.hpp>

#include "coda/gpu.h"

namespace coda::hopper {

/// A tile of kRows × kCols accumulators. kWarpGroups of them share a slab of 64 rows each; subtiles are what a stage of shared
/// memory holds.
template <int kRows, int kCols, int kGroups, int kSubtile>
struct Geometry {
  static constexpr int rows = kRows, cols = kCols, warp_groups = kGroups, subtile = kSubtile;
  static constexpr int slab_rows = 64 * kGroups, slabs = kRows / slab_rows;
  static constexpr int subtiles = kCols / kSubtile;  // of a slab
  static constexpr int units = kSubtile / 16;        // of a subtile
  static_assert(kRows % slab_rows == 0 && kCols % kSubtile == 0 && kSubtile % 16 == 0);
};

/// Where a thread stands.
struct Place {
  int row0, col0;  // of the tile
  int m, n;        // of the whole
  int lane, q, r;
  int strip;  // which 16 rows of the slab are this warp's

  template <class G>
  CUTLASS_DEVICE int row(int slab, int h) const {
    return row0 + slab * G::slab_rows + strip * 16 + r + 8 * h;
  }
};

/// What every port can be asked; a port adds what its kind does: get for an In, put for an Out, gather for a Local. The order of
/// calls: begin_tile; for each slab begin_slab; for each of its subtiles begin_subtile; for each unit fetch, then get or put for
/// every value, then finish and end_unit; end_slab.
struct Port {
  static constexpr int load_bytes = 0, store_bytes = 0;  // of shared memory, a stage
  static constexpr int scratch_bytes = 0;                // of shared memory, a warp group

  template <class Params>
  CUTLASS_DEVICE static void prefetch_descriptor(const Params&) {}
  template <class Params>
  CUTLASS_DEVICE static void issue_load(const Params&, uint64_t*, char*, int, int) {}
  template <class Params>
  CUTLASS_DEVICE static void issue_store(const Params&, const Place&, char*, int, int) {}
  template <class Params>
  CUTLASS_DEVICE void begin_tile(const Params&, const Place&) {}
  template <class Params>
  CUTLASS_DEVICE void begin_slab(const Params&, const Place&, int) {}
  /// Subtile s, and which one follows it; −1: none in this tile.
  template <class Params>
  CUTLASS_DEVICE void begin_subtile(const Params&, const Place&, int /*s*/, int /*following*/) {}
  CUTLASS_DEVICE void fetch(uint32_t, int) {}
  CUTLASS_DEVICE void finish(uint32_t, int) {}
  template <class Params>
  CUTLASS_DEVICE void end_unit(const Params&, const Place&, int, int, char*) {}
  template <class Params>
  CUTLASS_DEVICE void end_slab(const Params&, const Place&, int, char*) {}
  CUTLASS_DEVICE void end_group() {}
};

/// One member for each field of a program, empty ones too (cute::tuple gives those by value).
template <int N, class T>
struct Member {
  T value;
};
template <class Numbers, class... Ts>
struct Members;
template <int... I, class... Ts>
struct Members<std::integer_sequence<int, I...>, Ts...> : Member<I, Ts>... {};
template <int N, class T>
CUTLASS_HOST_DEVICE T& member(Member<N, T>& m) {
  return m.value;
}
template <int N, class T>
CUTLASS_HOST_DEVICE const T& member(const Member<N, T>& m) {
  return m.value;
}

/// The lowering of a field of kind K in direction D: activations of type E, accumulators in pairs or not.
template <class K, Direction D, class E, bool kPairs, class G>
struct PortOf;

}  // namespace coda::hopper
