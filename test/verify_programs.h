// Programs that go wrong on an engine but not in the oracle, for tests of the verification.
#pragma once
#include <atomic>

#include "coda/operands.h"

namespace coda::test {

/// Whether the mathematics runs on an engine; the oracle's numbers know their error, or their slope.
template <class S>
inline constexpr bool on_an_engine = !requires(Real<S> x) {
  x.error;
};

/// 1 % too large on an engine.
template <class S = Tensors<bf16>>
struct TooLarge {
  Out<S, Tile<>> y;  // [M, N]

  CODA_FN void operator()(Real<S> acc) { y = acc * (on_an_engine<S> ? 1.01f : 1.f); }
};

/// The last bit of a value depends on how often the program has run in the process; the bound has room for that.
inline std::atomic<int> times_run = 0;
template <class S = Tensors<bf16>>
struct Unsteady {
  Out<S, Tile<float>> y;  // [M, N]

  CODA_FN void operator()(Real<S> acc) {
    const Real<S> rounded = (acc + 64.f) - 64.f;
    y = rounded * (on_an_engine<S> && times_run++ / 7 % 2 == 0 ? 1.0000001f : 1.f);
  }
};

}  // namespace coda::test
