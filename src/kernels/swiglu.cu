#include "coda/programs/swiglu.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN, RmsNormSwiGlu<Tensors<bf16>>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN, RmsNormSwiGlu<Tensors<bf16>, DropGateUp>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NN, NN, SwiGluBackward<Tensors<bf16>>);
