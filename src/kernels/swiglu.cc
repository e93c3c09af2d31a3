#include "coda/programs/swiglu.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(RmsNormSwiGlu<Tensors<float>>);
CODA_PROGRAM(RmsNormSwiGlu<Tensors<bf16>>);
CODA_PROGRAM(RmsNormSwiGlu<Tensors<float>, DropGateUp>);
CODA_PROGRAM(RmsNormSwiGlu<Tensors<bf16>, DropGateUp>);
CODA_PROGRAM(SwiGluBackward<Tensors<float>>);
CODA_PROGRAM(SwiGluBackward<Tensors<bf16>>);
