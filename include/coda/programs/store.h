// The plain product: acc stored, or added to what is there.
#pragma once
#include "coda/operands.h"

namespace coda {

/// out = acc. T: the element type of out, by default that of activations.
template <class S = Tensors<bf16>, class T = Activation>
struct Store {
  Out<S, Tile<T>> out;  // [M, N]

  CODA_FN void operator()(Real<S> acc) { out = acc; }
};

/// out = out + acc, in float: a main gradient that several micro-batches add to.
template <class S = Tensors<bf16>>
struct AccumulateInto {
  Out<S, Accumulate<float>> out;  // [M, N]

  CODA_FN void operator()(Real<S> acc) { out = acc; }
};

}  // namespace coda
