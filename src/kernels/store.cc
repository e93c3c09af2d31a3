#include "coda/programs/store.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(Store<Tensors<float>>);
CODA_PROGRAM(Store<Tensors<bf16>>);
CODA_PROGRAM(Store<Tensors<bf16>, float>);
CODA_PROGRAM(StoreBiased<Tensors<float>>);
CODA_PROGRAM(StoreBiased<Tensors<bf16>>);
CODA_PROGRAM(BiasGradient<Tensors<float>>);
CODA_PROGRAM(BiasGradient<Tensors<bf16>>);
CODA_PROGRAM(AccumulateInto<Tensors<float>>);
CODA_PROGRAM(AccumulateInto<Tensors<bf16>>);
