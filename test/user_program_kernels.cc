#include "coda/kernels.h"
#include "user_program.h"

using namespace coda;

CODA_PROGRAM(test::HeadNorm<Tensors<float>>);
CODA_PROGRAM(test::HeadNorm<Tensors<bf16>>);
CODA_PROGRAM(test::GroupSoftmax<Tensors<float>>);
CODA_PROGRAM(test::GroupSoftmax<Tensors<bf16>>);
CODA_PROGRAM(test::CausalScores<Tensors<float>>);
CODA_PROGRAM(test::PairPositions<Tensors<float>>);
CODA_PROGRAM(test::ManyFields<Tensors<float>>);
CODA_PROGRAM(test::ManyFields<Tensors<bf16>>);
CODA_PROGRAM(test::Spread<Tensors<float>>);
CODA_PROGRAM(test::Spread<Tensors<bf16>>);
