// Values that do not come in tiles: numbers, scalars, one per row, column or pair. They go straight from global memory to registers.
#pragma once
#include "coda/hopper/geometry.h"

namespace coda::hopper {

/// A plain field: a number, or a function object with its numbers.
template <class N>
struct NumberPort : Port {
  struct Params {
    N value;
  };
  static Params make(const N& value, int, int) { return {value}; }
  const Params* params;
  CUTLASS_DEVICE void begin_tile(const Params& p, const Place&) { params = &p; }
  CUTLASS_DEVICE N get(int, int, int) const { return params->value; }
};

template <Direction D, class E, bool kPairs, class G>
struct PortOf<Off, D, E, kPairs, G> : Port {
  struct Params {};
  static Params make(Nothing, int, int) { return {}; }
  CUTLASS_DEVICE Nothing get(int, int, int) const { return {}; }
  template <class V>
  CUTLASS_DEVICE void put(int, int, int, bool, bool, const V&) {}
};

template <class T, class E, bool kPairs, class G>
struct PortOf<Scalar<T>, Direction::in, E, kPairs, G> : NumberPort<T> {};

template <class T, class E, bool kPairs, class G>
struct PortOf<DeviceScalar<T>, Direction::in, E, kPairs, G> : Port {
  struct Params {
    const T* data;
  };
  static Params make(const T* data, int, int) { return {data}; }
  T value;
  CUTLASS_DEVICE void begin_tile(const Params& p, const Place&) { value = *p.data; }
  CUTLASS_DEVICE float get(int, int, int) const { return value; }
};

template <class T, class E, bool kPairs, class G>
struct PortOf<PerRow<T>, Direction::in, E, kPairs, G> : Port {
  struct Params {
    const T* data;
  };
  static Params make(Vector<const T> v, int, int) { return {v.data}; }
  T value[2];
  CUTLASS_DEVICE void begin_slab(const Params& p, const Place& place, int slab) {
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = place.row<G>(slab, h);
      value[h] = row < place.m ? p.data[row] : T(0);
    }
  }
  CUTLASS_DEVICE T get(int h, int, int) const { return value[h]; }
};

/// One value per column, or per pair with a period: of each subtile two per block of 8 columns, fetched one subtile ahead. data is
/// 8-byte aligned.
template <class T, bool kPerPair, class G>
struct ColumnValues : Port {
  static_assert(sizeof(T) == 4, "values per column and per pair are float or int32_t");
  static constexpr int kBlocks = kPerPair ? 1 : 2;  // of a unit
  struct Params {
    const T* data;
    int period;
  };
  static Params make(Vector<const T> v, int, int) { return {v.data, static_cast<int>(v.size)}; }
  struct alignas(8) Two {
    T value[2];
  };
  Two now[G::units][kBlocks], next[G::units][kBlocks];
  int ahead;  // per pair: where in the period the next unit to fetch begins

  CUTLASS_DEVICE void read(const Params& p, const Place& place, int s) {
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < G::units; ++u) {
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        if constexpr (kPerPair) {
          next[u][b] = *reinterpret_cast<const Two*>(p.data + ahead + 2 * place.q);
        } else {
          const int col = place.col0 + s * G::subtile + u * 16 + 8 * b + 2 * place.q;
          next[u][b] = {};
          if (col + 1 < place.n)
            next[u][b] = *reinterpret_cast<const Two*>(p.data + col);
          else if (col < place.n)
            next[u][b].value[0] = p.data[col];
        }
      }
      if constexpr (kPerPair) ahead = ahead + 8 < p.period ? ahead + 8 : 0;
    }
  }
  CUTLASS_DEVICE void locate(const Params& p, const Place& place, int s) {
    if constexpr (kPerPair) ahead = (place.col0 + s * G::subtile) / 2 % p.period;
  }
  CUTLASS_DEVICE void begin_tile(const Params& p, const Place& place) {
    locate(p, place, 0);
    read(p, place, 0);
  }
  CUTLASS_DEVICE void begin_subtile(const Params& p, const Place& place, int s, int following) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < G::units * kBlocks; ++i) now[i / kBlocks][i % kBlocks] = next[i / kBlocks][i % kBlocks];
    if (following < 0) return;
    if (following != s + 1) locate(p, place, following);
    read(p, place, following);
  }
  CUTLASS_DEVICE T at(int b, int e, int u) const { return now[u][b].value[e]; }
};

template <class T, class E, bool kPairs, class G>
struct PortOf<PerCol<T>, Direction::in, E, kPairs, G> : ColumnValues<T, false, G> {
  CUTLASS_DEVICE auto get(int, int x, int u) const {
    if constexpr (kPairs)
      return Pair<T>{this->at(0, x, u), this->at(1, x, u)};
    else
      return this->at(x >> 1, x & 1, u);
  }
};
template <class T, class E, class G>
struct PortOf<PerPair<T>, Direction::in, E, true, G> : ColumnValues<T, true, G> {
  CUTLASS_DEVICE T get(int, int x, int u) const { return this->at(0, x, u); }
};

}  // namespace coda::hopper
