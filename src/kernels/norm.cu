#include "coda/programs/norm.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN, Residual<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(TN, Residual<Tensors<bf16>, GammaInEpilogue>);
CODA_HOPPER_PROGRAM(TN, Residual<Tensors<bf16>, GammaPlusOneInEpilogue>);
CODA_HOPPER_PROGRAM(no_product, SumOfSquares<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(TN, RmsNorm<Tensors<bf16>>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NN, NN, RmsNormBackward<Tensors<bf16>>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NN, NN, RmsNormBackward<Tensors<bf16>, StreamEnds>);
CODA_HOPPER_PROGRAM(NN, RmsNormBackward<Tensors<bf16>, StreamJoins, GammaInEpilogue>);
CODA_HOPPER_PROGRAM(NN, RmsNormBackward<Tensors<bf16>, StreamEnds, GammaInEpilogue>);
CODA_HOPPER_PROGRAM(NN, RmsNormBackward<Tensors<bf16>, StreamJoins, GammaPlusOneInEpilogue>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NT, NT, FoldedWeightGradient<Tensors<bf16>>);
