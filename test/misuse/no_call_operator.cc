// Without a call operator there is no mathematics.
// expect: an epilogue program's call operator takes one accumulator, Real<S> or Pair<Real<S>>, and optionally At<S>, and returns void
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
  Out<S, Tile<>> out;

#ifdef CODA_MISUSE

#else
  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
#endif
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
