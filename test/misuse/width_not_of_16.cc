// Slots of a row reduction hold whole vectors and whole blocks of pairs.
// expect: the width of a row reduction must be a multiple of 16 columns, so that pairs and vectors do not straddle its slots
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  Out<S, RowSum<float, 40>> sum;
#else
  Out<S, RowSum<float, 48>> sum;
#endif

  CODA_FN void operator()(Real<S> acc) {
    sum = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
