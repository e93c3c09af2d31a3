#include "coda/programs/norm.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(Residual<Tensors<float>>);
CODA_PROGRAM(Residual<Tensors<bf16>>);
CODA_PROGRAM(Residual<Tensors<float>, GammaInEpilogue>);
CODA_PROGRAM(Residual<Tensors<bf16>, GammaInEpilogue>);
CODA_PROGRAM(Residual<Tensors<float>, GammaPlusOneInEpilogue>);
CODA_PROGRAM(Residual<Tensors<bf16>, GammaPlusOneInEpilogue>);
CODA_PROGRAM(SumOfSquares<Tensors<float>>);
CODA_PROGRAM(SumOfSquares<Tensors<bf16>>);
CODA_PROGRAM(RmsNorm<Tensors<float>>);
CODA_PROGRAM(RmsNorm<Tensors<bf16>>);
CODA_PROGRAM(RmsNormBackward<Tensors<float>>);
CODA_PROGRAM(RmsNormBackward<Tensors<bf16>>);
CODA_PROGRAM(RmsNormBackward<Tensors<float>, StreamEnds>);
CODA_PROGRAM(RmsNormBackward<Tensors<bf16>, StreamEnds>);
CODA_PROGRAM(RmsNormBackward<Tensors<float>, StreamJoins, GammaInEpilogue>);
CODA_PROGRAM(RmsNormBackward<Tensors<bf16>, StreamJoins, GammaInEpilogue>);
CODA_PROGRAM(RmsNormBackward<Tensors<float>, StreamEnds, GammaInEpilogue>);
CODA_PROGRAM(RmsNormBackward<Tensors<bf16>, StreamEnds, GammaInEpilogue>);
CODA_PROGRAM(RmsNormBackward<Tensors<float>, StreamJoins, GammaPlusOneInEpilogue>);
CODA_PROGRAM(RmsNormBackward<Tensors<bf16>, StreamJoins, GammaPlusOneInEpilogue>);
CODA_PROGRAM(FoldedWeightGradient<Tensors<float>>);
CODA_PROGRAM(FoldedWeightGradient<Tensors<bf16>>);
