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

/// out = acc + bias: a linear layer.
template <class S = Tensors<bf16>>
struct StoreBiased {
  In<S, PerCol<float>> bias;  // [N]
  Out<S, Tile<>> out;         // [M, N]

  CODA_FN void operator()(Real<S> acc) { out = acc + bias; }
};

/// The bias gradient of a product whose upstream gradient is stored: a map over it.
template <class S = Tensors<bf16>>
struct BiasGradient {
  Out<S, ColSum<float, 64>> d_bias;  // [M/64, N]  coda::total adds the slots

  CODA_FN void operator()(Real<S> d_out) { d_bias = d_out; }
};

/// out = out + acc, in float: a main gradient that several micro-batches add to.
template <class S = Tensors<bf16>>
struct AccumulateInto {
  Out<S, Accumulate<float>> out;  // [M, N]

  CODA_FN void operator()(Real<S> acc) { out = acc; }
};

}  // namespace coda
