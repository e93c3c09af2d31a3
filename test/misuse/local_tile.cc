// A local is a reduction over a group of columns.
// expect: a field of the epilogue program has a kind that cannot be used in its direction: PerRow, PerCol, PerPair, Scalar and DeviceScalar are In; Accumulate, ColSum and RowLogSumExp are Out; a Local is a RowSum or RowMax
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Local<S, Tile<>> sum;
  Out<S, Tile<>> out;
#else
  Local<S, RowSum<float, 128>> sum;
  Out<S, Tile<>> out;
#endif

  CODA_FN void measure(Real<S> acc) {
    sum = acc;
  }
  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
