// What is measured has nowhere to go.
// expect: an epilogue program has Local fields if and only if it has measure()
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Out<S, Tile<>> out;

  CODA_FN void measure(Real<S>&) {}
  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
#else
  Out<S, Tile<>> out;

  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
#endif
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
