#include "coda/programs/rope.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(RmsNormRope<Tensors<float>>);
CODA_PROGRAM(RmsNormRope<Tensors<bf16>>);
CODA_PROGRAM(RopeBackward<Tensors<float>>);
CODA_PROGRAM(RopeBackward<Tensors<bf16>>);
CODA_PROGRAM(RmsNormRope<Tensors<float>, WithBias>);
CODA_PROGRAM(RmsNormRope<Tensors<bf16>, WithBias>);
CODA_PROGRAM(RopeBackward<Tensors<float>, WithBias>);
CODA_PROGRAM(RopeBackward<Tensors<bf16>, WithBias>);
