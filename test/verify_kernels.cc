#include "verify_programs.h"

#include "coda/kernels.h"

using namespace coda;

CODA_PROGRAM(test::TooLarge<Tensors<float>>);
CODA_PROGRAM(test::TooLarge<Tensors<bf16>>);
CODA_PROGRAM(test::Unsteady<Tensors<bf16>>);
