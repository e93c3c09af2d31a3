// One value per row that many accumulators assign is a reduction, and has to say which.
// expect: a field of the epilogue program has a kind that cannot be used in its direction: PerRow, PerCol, PerPair, Scalar and DeviceScalar are In; Accumulate, ColSum and RowLogSumExp are Out; a Local is a RowSum or RowMax
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Out<S, PerRow<float>> sum;
#else
  Out<S, RowSum<float, 128>> sum;
#endif

  CODA_FN void operator()(Real<S> acc) {
    sum = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
