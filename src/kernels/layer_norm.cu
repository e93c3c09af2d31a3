#include "coda/programs/layer_norm.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM(TN, ResidualMoments<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(TN, LayerNorm<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(no_product, LayerNormUpstream<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(NN, LayerNormBackward<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(NN, LayerNormBackward<Tensors<bf16>, StreamEnds>);
