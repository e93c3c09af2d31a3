// A program that coda does not have: out = softplus(scale · acc + bias).
#pragma once
#include "coda/math.h"
#include "coda/operands.h"

namespace mine {

template <class S = coda::Tensors<float>>
struct ScaledSoftplus {
  coda::In<S, coda::PerCol<float>> bias;  // [N]
  coda::Out<S, coda::Tile<>> out;         // [M, N]
  float scale = 1;

  CODA_FN void operator()(coda::Real<S> acc) {
    using coda::exp, coda::log;
    out = log(1.0f + exp(scale * acc + bias));
  }
};

}  // namespace mine
