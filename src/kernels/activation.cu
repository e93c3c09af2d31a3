#include "coda/programs/activation.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM(TN, Activated<Tensors<bf16>, SquaredRelu>);
CODA_HOPPER_PROGRAM(TN, Activated<Tensors<bf16>, GeluErf, NoNormInFront, WithBias>);
CODA_HOPPER_PROGRAM(TN, Activated<Tensors<bf16>, GeluTanh, NormInFront, WithBias>);
CODA_HOPPER_PROGRAM(TN, Activated<Tensors<bf16>, GeluTanh, NormInFront, WithBias, DropInput>);
CODA_HOPPER_PROGRAM(NN, ActivatedBackward<Tensors<bf16>, SquaredRelu>);
CODA_HOPPER_PROGRAM_ON(cooperative_128x128, NN, ActivatedBackward<Tensors<bf16>, GeluErf, NoNormInFront, WithBias>);
CODA_HOPPER_PROGRAM_ON(cooperative_128x128, NN, ActivatedBackward<Tensors<bf16>, GeluTanh, NormInFront, WithBias>);
