// Results are assigned to Out fields, not returned.
// expect: an epilogue program's call operator takes one accumulator, Real<S> or Pair<Real<S>>, and optionally At<S>, and returns void
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
  Out<S, Tile<>> out;

#ifdef CODA_MISUSE
  CODA_FN Real<S> operator()(Real<S> acc) {
    return acc;
  }
#else
  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
#endif
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
