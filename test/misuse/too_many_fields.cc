// Fields are enumerated by structured bindings, up to twenty.
// expect: an epilogue program has at most 20 fields
#include "coda/gemm.h"

using namespace coda;

template <class S>
struct Program {
#ifdef CODA_MISUSE
  In<S, Scalar<float>> f0;
  In<S, Scalar<float>> f1;
  In<S, Scalar<float>> f2;
  In<S, Scalar<float>> f3;
  In<S, Scalar<float>> f4;
  In<S, Scalar<float>> f5;
  In<S, Scalar<float>> f6;
  In<S, Scalar<float>> f7;
  In<S, Scalar<float>> f8;
  In<S, Scalar<float>> f9;
  In<S, Scalar<float>> f10;
  In<S, Scalar<float>> f11;
  In<S, Scalar<float>> f12;
  In<S, Scalar<float>> f13;
  In<S, Scalar<float>> f14;
  In<S, Scalar<float>> f15;
  In<S, Scalar<float>> f16;
  In<S, Scalar<float>> f17;
  In<S, Scalar<float>> f18;
  In<S, Scalar<float>> f19;
  Out<S, Tile<>> out;
#else
  In<S, Scalar<float>> f0;
  In<S, Scalar<float>> f1;
  In<S, Scalar<float>> f2;
  In<S, Scalar<float>> f3;
  In<S, Scalar<float>> f4;
  In<S, Scalar<float>> f5;
  In<S, Scalar<float>> f6;
  In<S, Scalar<float>> f7;
  In<S, Scalar<float>> f8;
  In<S, Scalar<float>> f9;
  In<S, Scalar<float>> f10;
  In<S, Scalar<float>> f11;
  In<S, Scalar<float>> f12;
  In<S, Scalar<float>> f13;
  In<S, Scalar<float>> f14;
  In<S, Scalar<float>> f15;
  In<S, Scalar<float>> f16;
  In<S, Scalar<float>> f17;
  In<S, Scalar<float>> f18;
  Out<S, Tile<>> out;
#endif

  CODA_FN void operator()(Real<S> acc) {
    out = acc;
  }
};

void call(Cpu& cpu, Matrix<const float> x) {
  gemm(cpu, x, x, Program<Tensors<float>>{});
}
