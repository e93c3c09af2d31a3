#include "coda/programs/store.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM(TN | NN | NT, Store<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(TN | NN | NT, Store<Tensors<bf16>, float>);
CODA_HOPPER_PROGRAM(TN, StoreBiased<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(no_product, BiasGradient<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(NT, AccumulateInto<Tensors<bf16>>);
