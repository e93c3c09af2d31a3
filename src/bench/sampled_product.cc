#include "sampled_product.h"

#include <algorithm>
#include <vector>

namespace coda::bench {

namespace {
constexpr int64_t kCols = 128;
}

oracle::Grid<double> sampled_product(Cpu& cpu, const oracle::Grid<double>& a, Matrix<const bf16> b, bool transposed) {
  const int64_t samples = a.rows, n = transposed ? b.cols : b.rows, depth = a.cols;
  oracle::Grid<double> turned(depth, samples);  // so that one element of b meets all samples side by side
  for (int64_t i = 0; i < samples; ++i)
    for (int64_t k = 0; k < depth; ++k) turned(k, i) = a(i, k);
  oracle::Grid<double> out(samples, n);
  cpu.parallel_for((n + kCols - 1) / kCols, [&](int64_t block, int) {
    const int64_t begin = block * kCols, end = std::min(begin + kCols, n);
    std::vector<double> sums(static_cast<size_t>((end - begin) * samples));
    const auto add = [&](int64_t k, int64_t col, bf16 element) {
      const double factor = static_cast<double>(static_cast<float>(element));
      const double* with = &turned(k, 0);
      double* sum = &sums[static_cast<size_t>((col - begin) * samples)];
      for (int64_t i = 0; i < samples; ++i) sum[i] += with[i] * factor;
    };
    if (transposed) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t col = begin; col < end; ++col) add(k, col, b(k, col));
    } else {
      for (int64_t col = begin; col < end; ++col)
        for (int64_t k = 0; k < depth; ++k) add(k, col, b(col, k));
    }
    for (int64_t col = begin; col < end; ++col)
      for (int64_t i = 0; i < samples; ++i) out(i, col) = sums[static_cast<size_t>((col - begin) * samples + i)];
  });
  return out;
}

}  // namespace coda::bench
