// Uses what an installed coda offers: its headers and its library.
#include <cstdio>

#include "coda/cpu.h"
#include "coda/error.h"
#include "coda/tensor.h"

int main() {
  const float value = coda::bf16(1.00390625f);
  coda::Cpu cpu(2);
  float data[6] = {};
  const coda::Matrix<float> m(data, 2, 3);
  cpu.parallel_for(m.rows, [&](int64_t i, int) { m(i, 1) = value; });
  std::printf("%g %g\n", m(0, 1), m(1, 1));
  return m(0, 1) == 1.0f && m(1, 1) == 1.0f ? 0 : 1;
}
