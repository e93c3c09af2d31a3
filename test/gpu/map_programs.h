// The programs that map_test runs.
#pragma once
#include "coda/programs/activation.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/head_norm.h"
#include "coda/programs/layer_norm.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"

namespace coda::test {

/// What the library's programs leave out: groups of more than 128 columns in two passes, widths that share no multiple
/// below 768, column sums of an odd height, half tiles of float, scalars.
template <class S = Tensors<bf16>>
struct WideGroups {
  In<S, Scalar<float>> scale;
  In<S, DeviceScalar<float>> factor;
  In<S, RowSum<float, 16>> narrow;
  Local<S, RowMax<float, 256>, 0> top;
  Local<S, RowSum<float, 256>, 1> total;
  Out<S, HalfTile<float>> where;      // [M, N/2]
  Out<S, Tile<>> p;                   // [M, N]
  Out<S, RowLogSumExp<384>> lse;      // [N/384, M]
  Out<S, RowMax<float, 64>> largest;  // [N/64, M]
  Out<S, ColSum<float, 5>> columns;   // [M/5, N]
  Out<S, ColSum<float, 2>> twos;      // [M/2, N]

  CODA_FN void measure(Pass<0>, Pair<Real<S>> acc) { top = Pair<Real<S>>{acc.first, max(acc.first, acc.second)}; }
  CODA_FN void measure(Pass<1>, Pair<Real<S>>& acc) {
    acc = Pair<Real<S>>{exp(acc.first - top), exp(acc.second - top)};
    total = acc;
  }
  CODA_FN void operator()(Pair<Real<S>> acc, At<S> at) {
    where = acc.first - acc.second + select(at.col < at.row, to_real(at.col), -to_real(at.row));
    p = (1.f / total) * acc;
    lse = scale * acc;
    largest = Real<S>(factor) * narrow * acc;
    columns = acc;
    twos = scale * acc;
  }
};

/// The narrowest slots, of single accumulators.
template <class S = Tensors<bf16>>
struct NarrowGroups {
  Local<S, RowMax<float, 32>> top;
  Out<S, RowSum<float, 16>> sum;     // [N/16, M]
  Out<S, RowLogSumExp<64>> lse;      // [N/64, M]
  Out<S, ColSum<float, 5>> columns;  // [M/5, N]

  CODA_FN void measure(Real<S> acc) { top = acc; }
  CODA_FN void operator()(Real<S> acc) {
    sum = acc - top;
    lse = acc;
    columns = tanh(acc) + erf(acc) + log(abs(acc) + 1.f) + sqrt(abs(acc));
  }
};

}  // namespace coda::test

/// Every program of the test: X(program of Tensors<bf16>).
#define CODA_MAP_TEST_PROGRAMS(X)                                                   \
  X(Store<Tensors<bf16>>)                                                           \
  X(Store<Tensors<bf16>, float>)                                                    \
  X(AccumulateInto<Tensors<bf16>>)                                                  \
  X(Activated<Tensors<bf16>, GeluErf, NoNormInFront, WithBias>)                     \
  X(RmsNormSwiGlu<Tensors<bf16>>)                                                   \
  X(SwiGluBackward<Tensors<bf16>>)                                                  \
  X(RopeBackward<Tensors<bf16>>)                                                    \
  X(LayerNormUpstream<Tensors<bf16>>)                                               \
  X(ResidualMoments<Tensors<bf16>>)                                                 \
  X(HeadNormRope<Tensors<bf16>, HeadWidth<256>>)                                    \
  X(HeadNormRopeBackward<Tensors<bf16>, HeadWidth<64>>)                             \
  X(CrossEntropy<Tensors<bf16>, KeepLogits, Uncapped, WithLogitSum>)                \
  X(CrossEntropyBackward<Tensors<bf16>>)                                            \
  X(CrossEntropyBackward<Tensors<bf16>, RecomputeLogits, SoftCapped, WithLogitSum>) \
  X(WideGroups<Tensors<bf16>>)                                                      \
  X(NarrowGroups<Tensors<bf16>>)
