#include "coda/programs/cross_entropy.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN,
                        CrossEntropy<Tensors<bf16>, KeepLogits, Uncapped, WithoutLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, KeepLogits, Uncapped, WithLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, KeepLogits, SoftCapped, WithoutLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, KeepLogits, SoftCapped, WithLogitSum>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN, TN,
                        CrossEntropy<Tensors<bf16>, RecomputeLogits, Uncapped, WithoutLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, RecomputeLogits, Uncapped, WithLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, RecomputeLogits, SoftCapped, WithoutLogitSum>);
CODA_HOPPER_PROGRAM(TN, CrossEntropy<Tensors<bf16>, RecomputeLogits, SoftCapped, WithLogitSum>);
