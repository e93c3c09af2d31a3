#include "coda/kernels.h"
#include "scaled_softplus.h"

CODA_PROGRAM(mine::ScaledSoftplus<coda::Tensors<float>>);
