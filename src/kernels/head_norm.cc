#include "coda/programs/head_norm.h"

#include "coda/kernels.h"

using namespace coda;

#define CODA_HEAD_NORM(E)                                               \
  CODA_PROGRAM(HeadNormRope<Tensors<E>, HeadWidth<64>>);                \
  CODA_PROGRAM(HeadNormRope<Tensors<E>, HeadWidth<128>>);               \
  CODA_PROGRAM(HeadNormRope<Tensors<E>, HeadWidth<128>, DropUnnormed>); \
  CODA_PROGRAM(HeadNormRopeBackward<Tensors<E>, HeadWidth<64>>);        \
  CODA_PROGRAM(HeadNormRopeBackward<Tensors<E>, HeadWidth<128>>)

CODA_HEAD_NORM(float);
CODA_HEAD_NORM(bf16);
