// A lambda has no fields to read its operands from.
// expect: an epilogue program is a struct template over the side S, named with S = Tensors<E>
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
  Out<S, Tile<>> out;

  CODA_FN void operator()(Real<S> acc) { out = acc; }
};

void call(Cpu& cpu, Matrix<const float> x) {
#ifdef CODA_MISUSE
  gemm(cpu, x, x, [](float) {});
#else
  gemm(cpu, x, x, Program<Tensors<float>>{});
#endif
}
