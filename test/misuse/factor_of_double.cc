// A product is of float or bf16.
// expect: a product's factors are matrices of float or bf16
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
  Out<S, Tile<>> out;

  CODA_FN void operator()(Real<S> acc) { out = acc; }
};

#ifdef CODA_MISUSE
using FactorElement = double;
#else
using FactorElement = float;
#endif
void call(Cpu& cpu, Matrix<const FactorElement> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
