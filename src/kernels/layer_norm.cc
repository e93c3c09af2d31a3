#include "coda/programs/layer_norm.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(ResidualMoments<Tensors<float>>);
CODA_PROGRAM(ResidualMoments<Tensors<bf16>>);
CODA_PROGRAM(LayerNorm<Tensors<float>>);
CODA_PROGRAM(LayerNorm<Tensors<bf16>>);
CODA_PROGRAM(LayerNormUpstream<Tensors<float>>);
CODA_PROGRAM(LayerNormUpstream<Tensors<bf16>>);
CODA_PROGRAM(LayerNormBackward<Tensors<float>>);
CODA_PROGRAM(LayerNormBackward<Tensors<bf16>>);
CODA_PROGRAM(LayerNormBackward<Tensors<float>, StreamEnds>);
CODA_PROGRAM(LayerNormBackward<Tensors<bf16>, StreamEnds>);
CODA_PROGRAM(CentredWeightGradient<Tensors<float>>);
