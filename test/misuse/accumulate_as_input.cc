// Accumulate adds to memory; it is not read.
// expect: a field of the epilogue program has a kind that cannot be used in its direction: PerRow, PerCol, PerPair, Scalar and DeviceScalar are In; Accumulate, ColSum and RowLogSumExp are Out; a Local is a RowSum or RowMax
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  In<S, Accumulate<float>> total;
  Out<S, Tile<>> out;
#else
  In<S, Tile<float>> total;
  Out<S, Tile<>> out;
#endif

  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
