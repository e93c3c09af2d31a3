// An In field is read-only where pairs come.
// expect: an In field of an epilogue program is read-only; assign to an Out field
#define CODA_ISA generic
#include "coda/kernels.h"

using namespace coda;

template <class S>
struct Program {
  In<S, Tile<>> h;
  Out<S, Tile<>> out;

  CODA_FN void operator()(Pair<Real<S>> acc) {
#ifdef CODA_MISUSE
    h = acc;
#endif
    out = acc;
  }
};

CODA_PROGRAM(Program<Tensors<float>>);
