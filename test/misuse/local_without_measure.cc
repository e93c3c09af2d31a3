// Nothing fills the local.
// expect: an epilogue program has Local fields if and only if it has measure()
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Local<S, RowMax<float, 64>> top;
  Out<S, Tile<>> out;

  CODA_FN void operator()(Real<S> acc) {
    out = acc - top;
  }
#else
  Local<S, RowMax<float, 64>> top;
  Out<S, Tile<>> out;

  CODA_FN void measure(Real<S> acc) {
    top = acc;
  }
  CODA_FN void operator()(Real<S> acc) {
    out = acc - top;
  }
#endif
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
