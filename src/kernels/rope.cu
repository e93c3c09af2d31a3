#include "coda/programs/rope.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN, RmsNormRope<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(no_product, RopeBackward<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(TN, RmsNormRope<Tensors<bf16>, WithBias>);
CODA_HOPPER_PROGRAM(no_product, RopeBackward<Tensors<bf16>, WithBias>);
