// A program of one's own, run by an installed coda: 37 x 21 outputs against the formula in double precision.
#include <cmath>
#include <cstdio>
#include <vector>

#include "coda/gemm.h"
#include "scaled_softplus.h"

int main() {
  const int m = 37, n = 21, k = 19;
  std::vector<float> x(m * k), w(n * k), bias(n), out(m * n, NAN);
  for (int i = 0; i < m * k; ++i) x[i] = static_cast<float>(i % 7) - 3;
  for (int i = 0; i < n * k; ++i) w[i] = static_cast<float>(i % 5) * 0.125f - 0.25f;
  for (int i = 0; i < n; ++i) bias[i] = static_cast<float>(i) * 0.0625f;

  coda::Cpu cpu(2);
  coda::gemm(cpu, coda::Matrix<const float>(x.data(), m, k), coda::Matrix<const float>(w.data(), n, k),
             mine::ScaledSoftplus<>{.bias = {bias.data(), n}, .out = {out.data(), m, n}, .scale = 0.5f});

  double worst = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double acc = 0;
      for (int l = 0; l < k; ++l) acc += static_cast<double>(x[i * k + l]) * w[j * k + l];
      const double error = std::abs(out[i * n + j] - std::log1p(std::exp(0.5 * acc + bias[j])));
      if (!(error <= worst)) worst = error;  // a NaN is worst of all
    }
  }
  std::printf("worst error %g\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
