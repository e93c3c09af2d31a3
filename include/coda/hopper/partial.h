// Partial reductions: one slot per group of columns or rows, whatever the tile, added up in the same order whatever the tile.
//
// Along a row a thread adds its own values in ascending order of columns, then its quad adds theirs. Down a column the two rows
// of a thread, the eight threads of a strip, the four strips of a warp group.
#pragma once
#include <limits>

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include "coda/hopper/geometry.h"
#include "coda/hopper/warp.h"

namespace coda::hopper {

template <class Op>
CUTLASS_DEVICE float over_quad(float x) {
  x = Op::combine(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return Op::combine(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

template <class Op>
struct RowReduction {
  float running[2] = {Op::identity, Op::identity};
  template <class C>
  CUTLASS_DEVICE void take(int h, bool valid, const C& contribution) {
    running[h] = Op::combine(running[h], valid ? contribution.value : Op::identity);
  }
  CUTLASS_DEVICE float finish(int h) {
    const float result = over_quad<Op>(running[h]);
    running[h] = Op::identity;
    return result;
  }
};

/// Whether slots of width columns can be finished within a tile.
template <int kWidth, class G>
inline constexpr bool slots_fit = G::cols % kWidth == 0 && kWidth % 16 == 0;

template <class Op, int kWidth, class G>
struct RowPartialOut : Port {
  static_assert(slots_fit<kWidth, G>);
  struct Params {
    float* data;
    int64_t stride;
  };
  static Params make(Matrix<float> out, int, int) { return {out.data, out.stride}; }
  RowReduction<Op> reduction;
  template <class C>
  CUTLASS_DEVICE void put(int h, int, int, bool, bool valid_col, const C& contribution) {
    reduction.take(h, valid_col, contribution);
  }
  CUTLASS_DEVICE void end_unit(const Params& p, const Place& place, int slab, int unit, char*) {
    if ((unit + 1) * 16 % kWidth != 0) return;
    const int begin = (unit + 1) * 16 - kWidth;  // of the slot, in the tile
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float result = reduction.finish(h);
      const int row = place.row<G>(slab, h);
      if (place.q == 0 && row < place.m && place.col0 + begin < place.n)
        p.data[(place.col0 + begin) / kWidth * p.stride + row] = result;
    }
  }
};
template <int kWidth, class G>
struct RowPartialIn : Port {
  static_assert(slots_fit<kWidth, G>);
  static constexpr int kSlots = G::cols / kWidth;
  struct Params {
    const float* data;
    int64_t stride;
  };
  static Params make(Matrix<const float> in, int, int) { return {in.data, in.stride}; }
  float value[kSlots][2];
  int slot = 0;
  CUTLASS_DEVICE void begin_slab(const Params& p, const Place& place, int slab) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSlots * 2; ++i) {
      const int row = place.row<G>(slab, i % 2), col = place.col0 + i / 2 * kWidth;
      value[i / 2][i % 2] = row < place.m && col < place.n ? p.data[col / kWidth * p.stride + row] : 0.f;
    }
  }
  CUTLASS_DEVICE void begin_subtile(const Params&, const Place&, int s, int) { slot = s * G::units; }
  CUTLASS_DEVICE float get(int h, int, int u) const { return value[(slot + u) * 16 / kWidth][h]; }
};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowSum<T, W>, Direction::out, E, kPairs, G> : RowPartialOut<AddUp, W, G> {};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowMax<T, W>, Direction::out, E, kPairs, G> : RowPartialOut<Largest, W, G> {};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowSum<T, W>, Direction::in, E, kPairs, G> : RowPartialIn<W, G> {};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowMax<T, W>, Direction::in, E, kPairs, G> : RowPartialIn<W, G> {};

/// A local: what measure() gathers over a group of columns, then a value for later passes.
template <class Op, int kWidth, class G>
struct LocalPort : Port {
  struct Params {};
  static Params make(Nothing, int, int) { return {}; }
  RowReduction<Op> reduction;
  float value[2];
  CUTLASS_DEVICE float get(int h, int, int) const { return value[h]; }
  template <class C>
  CUTLASS_DEVICE void gather(int h, bool valid_col, const C& contribution) {
    reduction.take(h, valid_col, contribution);
  }
  CUTLASS_DEVICE void end_group() {
    value[0] = reduction.finish(0);
    value[1] = reduction.finish(1);
  }
};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowSum<T, W>, Direction::local, E, kPairs, G> : LocalPort<AddUp, W, G> {};
template <class T, int W, class E, bool kPairs, class G>
struct PortOf<RowMax<T, W>, Direction::local, E, kPairs, G> : LocalPort<Largest, W, G> {};

/// The running maximum and the sum of exponentials relative to it, rescaled once a unit.
template <int W, class E, bool kPairs, class G>
struct PortOf<RowLogSumExp<W>, Direction::out, E, kPairs, G> : Port {
  static_assert(slots_fit<W, G>);
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
  struct Params {
    MaxSum* data;
    int64_t stride;
  };
  static Params make(Matrix<MaxSum> out, int, int) { return {out.data, out.stride}; }
  float top[2] = {kNone, kNone}, total[2] = {0, 0};
  float waiting[4];  // of a row of a unit

  CUTLASS_DEVICE void put(int h, int x, int, bool, bool valid_col, float value) {
    waiting[x] = valid_col ? value : kNone;
    if (x == 3) take(h);
  }
  CUTLASS_DEVICE void put(int h, int x, int, bool, bool valid_col, Pair<float> value) {
    waiting[2 * x] = valid_col ? value.first : kNone;
    waiting[2 * x + 1] = valid_col ? value.second : kNone;
    if (x == 1) take(h);
  }
  /// 2^((x − reference)·log2 e). All at −∞: the difference would be NaN, and there is nothing to add.
  CUTLASS_DEVICE static float relative(float x, float reference) {
    float result;
    // volatile keeps the units in order: interleaved, they need more registers than there are.
    asm volatile("ex2.approx.ftz.f32 %0, %1;"
                 : "=f"(result)
                 : "f"(1.4426950408889634f * (x - (reference == kNone ? 0.f : reference))));
    return result;
  }
  CUTLASS_DEVICE void take(int h) {
    const auto& v = waiting;
    const float before = top[h];
    top[h] = max(before, max(max(v[0], v[1]), max(v[2], v[3])));
    total[h] = total[h] * relative(before, top[h]) +
               ((relative(v[0], top[h]) + relative(v[1], top[h])) + (relative(v[2], top[h]) + relative(v[3], top[h])));
  }
  CUTLASS_DEVICE void end_unit(const Params& p, const Place& place, int slab, int unit, char*) {
    if ((unit + 1) * 16 % W != 0) return;
    const int begin = (unit + 1) * 16 - W;  // of the slot, in the tile
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float largest = over_quad<Largest>(top[h]);
      const float sum = over_quad<AddUp>(total[h] * relative(top[h], largest));
      const int row = place.row<G>(slab, h);
      if (place.q == 0 && row < place.m && place.col0 + begin < place.n)
        p.data[(place.col0 + begin) / W * p.stride + row] = {largest, sum};
      top[h] = kNone;
      total[h] = 0;
    }
  }
};

/// Of 64 rows, which are a warp group's of a slab.
template <class T, int H, class E, bool kPairs, class G>
struct PortOf<ColSum<T, H>, Direction::out, E, kPairs, G> : Port {
  static_assert(H == 64, "on the GPU a fused ColSum has slots of 64 rows");
  static constexpr int scratch_bytes = 4 * G::cols * static_cast<int>(sizeof(float));  // [strip][column]
  struct Params {
    float* data;
    int64_t stride;
  };
  static Params make(Matrix<float> out, int, int) { return {out.data, out.stride}; }
  float v[2][2];  // [block][e], of a unit

  CUTLASS_DEVICE void add(int b, int e, int h, float x) { v[b][e] = h == 0 ? x : v[b][e] + x; }
  CUTLASS_DEVICE void put(int h, int x, int, bool valid_row, bool, float value) {
    add(x >> 1, x & 1, h, valid_row ? value : 0.f);
  }
  CUTLASS_DEVICE void put(int h, int x, int, bool valid_row, bool, Pair<float> value) {
    add(0, x, h, valid_row ? value.first : 0.f);
    add(1, x, h, valid_row ? value.second : 0.f);
  }
  CUTLASS_DEVICE void end_unit(const Params&, const Place& place, int, int unit, char* scratch) {
    float* strip = reinterpret_cast<float*>(scratch) + place.strip % 4 * G::cols;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float sum = v[i / 2][i % 2];
      CUTLASS_PRAGMA_UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
      if (place.r == 0) strip[unit * 16 + 8 * (i / 2) + 2 * place.q + i % 2] = sum;
    }
  }
  CUTLASS_DEVICE void end_slab(const Params& p, const Place& place, int slab, char* scratch) {
    const int group = place.strip / 4, row = place.row0 + slab * G::slab_rows + group * 64;
    const auto* strips = reinterpret_cast<const float*>(scratch);
    cutlass::arch::NamedBarrier::sync(128, cutlass::canonical_warp_group_idx());
    for (int col = place.strip % 4 * 32 + place.lane; col < G::cols; col += 128)
      if (row < place.m && place.col0 + col < place.n)
        p.data[row / H * p.stride + place.col0 + col] =
            ((strips[col] + strips[G::cols + col]) + strips[2 * G::cols + col]) + strips[3 * G::cols + col];
    cutlass::arch::NamedBarrier::sync(128, cutlass::canonical_warp_group_idx());
  }
};

}  // namespace coda::hopper
