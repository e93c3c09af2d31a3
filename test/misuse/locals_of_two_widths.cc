// All locals are over the same group of columns.
// expect: the Local fields of an epilogue program reduce over groups of one width
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Local<S, RowMax<float, 64>> top;
  Local<S, RowSum<float, 128>> sum;
  Out<S, Tile<>> out;
#else
  Local<S, RowMax<float, 64>> top;
  Local<S, RowSum<float, 64>> sum;
  Out<S, Tile<>> out;
#endif

  CODA_FN void measure(Real<S> acc) {
    top = acc;
    sum = acc;
  }
  CODA_FN void operator()(Real<S> acc) {
    out = (acc - top) * sum;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
