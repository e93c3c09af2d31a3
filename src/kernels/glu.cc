#include "coda/programs/glu.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(RmsNormGlu<Tensors<float>, GegluErf>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, GegluErf>);
CODA_PROGRAM(RmsNormGlu<Tensors<float>, GegluErf, DropGateUp>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, GegluErf, DropGateUp>);
CODA_PROGRAM(RmsNormGlu<Tensors<float>, GegluTanh>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, GegluTanh>);
CODA_PROGRAM(RmsNormGlu<Tensors<float>, GegluTanh, DropGateUp>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, GegluTanh, DropGateUp>);
CODA_PROGRAM(RmsNormGlu<Tensors<float>, SwigluClamped>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, SwigluClamped>);
CODA_PROGRAM(RmsNormGlu<Tensors<float>, SwigluClamped, DropGateUp>);
CODA_PROGRAM(RmsNormGlu<Tensors<bf16>, SwigluClamped, DropGateUp>);
CODA_PROGRAM(GluBackward<Tensors<float>, GegluErf>);
CODA_PROGRAM(GluBackward<Tensors<bf16>, GegluErf>);
CODA_PROGRAM(GluBackward<Tensors<float>, GegluTanh>);
CODA_PROGRAM(GluBackward<Tensors<bf16>, GegluTanh>);
CODA_PROGRAM(GluBackward<Tensors<float>, SwigluClamped>);
CODA_PROGRAM(GluBackward<Tensors<bf16>, SwigluClamped>);
