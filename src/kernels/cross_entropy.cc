#include "coda/programs/cross_entropy.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(CrossEntropy<Tensors<float>>);
CODA_PROGRAM(CrossEntropy<Tensors<bf16>>);
CODA_PROGRAM(CrossEntropy<Tensors<float>, RecomputeLogits>);
CODA_PROGRAM(CrossEntropy<Tensors<bf16>, RecomputeLogits>);
CODA_PROGRAM(CrossEntropyBackward<Tensors<float>>);
CODA_PROGRAM(CrossEntropyBackward<Tensors<bf16>>);
CODA_PROGRAM(CrossEntropyBackward<Tensors<float>, RecomputeLogits>);
CODA_PROGRAM(CrossEntropyBackward<Tensors<bf16>, RecomputeLogits>);
