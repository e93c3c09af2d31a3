#include "coda/programs/glu.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, GegluErf>);
CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, GegluErf, DropGateUp>);
CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, GegluTanh>);
CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, GegluTanh, DropGateUp>);
CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, SwigluClamped>);
CODA_HOPPER_PROGRAM(TN, RmsNormGlu<Tensors<bf16>, SwigluClamped, DropGateUp>);
CODA_HOPPER_PROGRAM_ON(cooperative_128x128, NN, GluBackward<Tensors<bf16>, GegluErf>);
CODA_HOPPER_PROGRAM(NN, GluBackward<Tensors<bf16>, GegluTanh>);
CODA_HOPPER_PROGRAM(NN, GluBackward<Tensors<bf16>, SwigluClamped>);
