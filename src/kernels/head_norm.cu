#include "coda/programs/head_norm.h"

#include "coda/hopper/kernels.h"

using namespace coda;

CODA_HOPPER_PROGRAM(TN, HeadNormRope<Tensors<bf16>, HeadWidth<64>>);
CODA_HOPPER_PROGRAM(TN, HeadNormRope<Tensors<bf16>, HeadWidth<128>>);
CODA_HOPPER_PROGRAM(TN, HeadNormRope<Tensors<bf16>, HeadWidth<128>, DropUnnormed>);
CODA_HOPPER_PROGRAM(no_product, HeadNormRopeBackward<Tensors<bf16>, HeadWidth<64>>);
CODA_HOPPER_PROGRAM(no_product, HeadNormRopeBackward<Tensors<bf16>, HeadWidth<128>>);
