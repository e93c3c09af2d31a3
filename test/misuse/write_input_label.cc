// An In field of integers is read-only.
// expect: an In field of an epilogue program is read-only; assign to an Out field
#define CODA_ISA generic
#include "coda/kernels.h"

using namespace coda;

template <class S>
struct Program {
  In<S, PerRow<int32_t>> label;
  Out<S, Tile<>> out;

  CODA_FN void operator()(Real<S> acc) {
#ifdef CODA_MISUSE
    label = 1;
#endif
    out = acc;
  }
};

CODA_PROGRAM(Program<Tensors<float>>);
