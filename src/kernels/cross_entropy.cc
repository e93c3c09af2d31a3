#include "coda/programs/cross_entropy.h"

#include "coda/kernels.h"

using namespace coda;

#define CODA_CROSS_ENTROPY(...)                            \
  CODA_PROGRAM(CrossEntropy<Tensors<float>, __VA_ARGS__>); \
  CODA_PROGRAM(CrossEntropy<Tensors<bf16>, __VA_ARGS__>)

CODA_CROSS_ENTROPY(KeepLogits, Uncapped, WithoutLogitSum);
CODA_CROSS_ENTROPY(KeepLogits, Uncapped, WithLogitSum);
CODA_CROSS_ENTROPY(KeepLogits, SoftCapped, WithoutLogitSum);
CODA_CROSS_ENTROPY(KeepLogits, SoftCapped, WithLogitSum);
CODA_CROSS_ENTROPY(RecomputeLogits, Uncapped, WithoutLogitSum);
CODA_CROSS_ENTROPY(RecomputeLogits, Uncapped, WithLogitSum);
CODA_CROSS_ENTROPY(RecomputeLogits, SoftCapped, WithoutLogitSum);
CODA_CROSS_ENTROPY(RecomputeLogits, SoftCapped, WithLogitSum);
