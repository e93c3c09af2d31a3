#include "coda/programs/activation.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(Activated<Tensors<float>, SquaredRelu>);
CODA_PROGRAM(Activated<Tensors<bf16>, SquaredRelu>);
CODA_PROGRAM(Activated<Tensors<float>, GeluErf, NoNormInFront, WithBias>);
CODA_PROGRAM(Activated<Tensors<bf16>, GeluErf, NoNormInFront, WithBias>);
CODA_PROGRAM(Activated<Tensors<float>, GeluTanh, NormInFront, WithBias>);
CODA_PROGRAM(Activated<Tensors<float>, GeluTanh, NormInFront, WithBias, DropInput>);
CODA_PROGRAM(Activated<Tensors<bf16>, GeluTanh, NormInFront, WithBias>);
CODA_PROGRAM(Activated<Tensors<bf16>, GeluTanh, NormInFront, WithBias, DropInput>);
CODA_PROGRAM(ActivatedBackward<Tensors<float>, SquaredRelu>);
CODA_PROGRAM(ActivatedBackward<Tensors<bf16>, SquaredRelu>);
CODA_PROGRAM(ActivatedBackward<Tensors<float>, GeluErf, NoNormInFront, WithBias>);
CODA_PROGRAM(ActivatedBackward<Tensors<bf16>, GeluErf, NoNormInFront, WithBias>);
CODA_PROGRAM(ActivatedBackward<Tensors<float>, GeluTanh, NormInFront, WithBias>);
CODA_PROGRAM(ActivatedBackward<Tensors<bf16>, GeluTanh, NormInFront, WithBias>);
