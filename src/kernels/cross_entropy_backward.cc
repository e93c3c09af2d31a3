#include "coda/programs/cross_entropy.h"

#include "coda/kernels.h"

using namespace coda;

#define CODA_CROSS_ENTROPY_BACKWARD(...)                           \
  CODA_PROGRAM(CrossEntropyBackward<Tensors<float>, __VA_ARGS__>); \
  CODA_PROGRAM(CrossEntropyBackward<Tensors<bf16>, __VA_ARGS__>)

CODA_CROSS_ENTROPY_BACKWARD(KeepLogits, Uncapped, WithoutLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(KeepLogits, Uncapped, WithLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(KeepLogits, SoftCapped, WithoutLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(KeepLogits, SoftCapped, WithLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(RecomputeLogits, Uncapped, WithoutLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(RecomputeLogits, Uncapped, WithLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(RecomputeLogits, SoftCapped, WithoutLogitSum);
CODA_CROSS_ENTROPY_BACKWARD(RecomputeLogits, SoftCapped, WithLogitSum);
