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

/// Two neighbouring values of a vector, at a multiple of 8 bytes.
template <class T>
struct alignas(8) Two {
  static_assert(sizeof(T) == 4, "values per column and per pair are float or int32_t");
  T value[2];
};

/// Read when a subtile begins: the wait for its tiles hides that.
template <class T, class E, bool kPairs, class G>
struct PortOf<PerCol<T>, Direction::in, E, kPairs, G> : Port {
  struct Params {
    const T* data;
  };
  static Params make(Vector<const T> v, int, int) { return {v.data}; }
  Two<T> now[G::units][2];  // [unit][block]
  CUTLASS_DEVICE void begin_subtile(const Params& p, const Place& place, int s, int) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < G::units * 2; ++i) {
      const int col = place.col0 + s * G::subtile + i * 8 + 2 * place.q;
      auto& two = now[i / 2][i % 2];
      two = {};
      if (col + 1 < place.n)
        two = *reinterpret_cast<const Two<T>*>(p.data + col);
      else if (col < place.n)
        two.value[0] = p.data[col];
    }
  }
  CUTLASS_DEVICE auto get(int, int x, int u) const {
    if constexpr (kPairs)
      return Pair<T>{now[u][0].value[x], now[u][1].value[x]};
    else
      return now[u][x >> 1].value[x & 1];
  }
};

/// Periodic. Fetched one subtile ahead: programs that rotate have no tiles to wait for.
template <class T, class E, class G>
struct PortOf<PerPair<T>, Direction::in, E, true, G> : Port {
  struct Params {
    const T* data;
    int period;
  };
  static Params make(Vector<const T> v, int, int) { return {v.data, static_cast<int>(v.size)}; }
  Two<T> now[G::units], next[G::units];
  int ahead;  // where in the period the next unit to fetch begins

  CUTLASS_DEVICE void read(const Params& p, const Place& place) {
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < G::units; ++u) {
      next[u] = *reinterpret_cast<const Two<T>*>(p.data + ahead + 2 * place.q);
      ahead = ahead + 8 < p.period ? ahead + 8 : 0;
    }
  }
  CUTLASS_DEVICE void locate(const Params& p, const Place& place, int s) {
    ahead = (place.col0 + s * G::subtile) / 2 % p.period;
  }
  CUTLASS_DEVICE void begin_tile(const Params& p, const Place& place) {
    locate(p, place, 0);
    read(p, place);
  }
  CUTLASS_DEVICE void begin_subtile(const Params& p, const Place& place, int s, int following) {
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < G::units; ++u) now[u] = next[u];
    if (following < 0) return;
    if (following != s + 1) locate(p, place, following);
    read(p, place);
  }
  CUTLASS_DEVICE T get(int, int x, int u) const { return now[u].value[x]; }
};

}  // namespace coda::hopper
