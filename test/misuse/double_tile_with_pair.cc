// A pair of pairs is no value.
// expect: a field of the epilogue program has no value for its accumulator: HalfTile and PerPair need a call operator that takes a Pair, DoubleTile one that takes a single value
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Out<S, DoubleTile<>> out;
#else
  Out<S, Tile<>> out;
#endif

  CODA_FN void operator()(Pair<Real<S>> acc) {
    out = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
