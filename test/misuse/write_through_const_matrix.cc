// A view of constant values cannot be written through.
// expect: assignment of read-only location
#include "coda/tensor.h"

float first(coda::Matrix<const float> m) {
#ifdef CODA_MISUSE
  m(0, 0) = 1;
#endif
  return m(0, 0);
}
