#include "coda/programs/store.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM_AND(cooperative_128x256, TN | NN | NT, TN | NN | NT, Store<Tensors<bf16>>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NT, TN | NN | NT, Store<Tensors<bf16>, float>);
CODA_HOPPER_PROGRAM(TN, StoreBiased<Tensors<bf16>>);
CODA_HOPPER_PROGRAM(no_product, BiasGradient<Tensors<bf16>>);
CODA_HOPPER_PROGRAM_AND(cooperative_128x256, NT, NT, AccumulateInto<Tensors<bf16>>);
