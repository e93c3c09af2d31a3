// The CPU engine's inner product, LIBXSMM's run-time kernels on packed panels, against OpenBLAS: the whole product, and a call per
// block. One thread, fp32, C = A·Bᵀ, GFLOP/s, best of several runs that take turns. Prints the largest difference between
// the results too: a fast wrong kernel is no kernel.
#include <cblas.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/microkernel.h"
#include "cpu/pack.h"

namespace {

using Floats = std::vector<float>;
constexpr int64_t kRows = 96, kCols = 128, kDepth = 256, kRounds = 7;

template <class Body>
double seconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Product {
  int64_t m, n, k;
  Floats a, b, packed, whole, blocks, kernels;

  Product(int64_t m_, int64_t n_, int64_t k_) : m(m_), n(n_), k(k_) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const auto fill = [&](Floats& x, int64_t size) {
      x.resize(static_cast<size_t>(size));
      for (float& value : x) value = uniform(random);
    };
    fill(a, m * k);
    fill(b, n * k);
    packed.resize(static_cast<size_t>((n + kCols) * k));
    for (Floats* out : {&whole, &blocks, &kernels}) out->assign(static_cast<size_t>(m * n), std::nanf(""));
  }

  void sgemm(int64_t row, int64_t rows, int64_t col, int64_t cols, Floats& out) const {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows), static_cast<int>(cols),
                static_cast<int>(k), 1, a.data() + row * k, static_cast<int>(k), b.data() + col * k,
                static_cast<int>(k), 0, out.data() + row * n + col, static_cast<int>(n));
  }
  void run_whole() { sgemm(0, m, 0, n, whole); }
  void run_blocks() {
    for (int64_t i = 0; i < m; i += kCols)
      for (int64_t j = 0; j < n; j += kCols) sgemm(i, std::min(kCols, m - i), j, std::min(kCols, n - j), blocks);
  }
  void run_kernels() {
    const coda::detail::Factor factor{b.data(), coda::ElementType::float32, n, k, k, false};
    Floats acc(static_cast<size_t>(kRows * kCols));
    for (int64_t j = 0; j < n; j += kCols)
      coda::cpu::packing().columns(factor, j, std::min(kCols, n - j), 0, k, packed.data() + j * k, kCols);
    for (int64_t i = 0; i < m; i += kRows)
      for (int64_t j = 0; j < n; j += kCols) {
        const int64_t rows = std::min(kRows, m - i), cols = std::min(kCols, n - j);
        for (int64_t l = 0; l < k; l += kDepth) {
          const coda::cpu::Microkernel multiply(rows, cols, std::min(kDepth, k - l), k, kCols, kCols, l > 0);
          multiply(a.data() + i * k + l, packed.data() + j * k + l * kCols, acc.data());
        }
        for (int64_t row = 0; row < rows; ++row)
          std::copy_n(acc.data() + row * kCols, cols, kernels.data() + (i + row) * n + j);
      }
  }
};

double largest_difference(const Floats& a, const Floats& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= worst)) worst = difference;
  }
  return worst;
}

}  // namespace

int main() {
  openblas_set_num_threads(1);
  fmt::print("OpenBLAS runs its {} kernels; GFLOP/s, one thread, best of {}\n", openblas_get_corename(), kRounds);
  fmt::print("{:>18} {:>10} {:>12} {:>24} {:>12}\n", "M, N, K", "OpenBLAS", "per block", "LIBXSMM, with packing",
             "difference");
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{2048, 1376, 256},
                                {2048, 256, 688},
                                {2048, 512, 256},
                                {1024, 1024, 1024},
                                {1376, 256, 2048}}) {
    Product product(m, n, k);
    double best[3];
    std::fill_n(best, 3, std::numeric_limits<double>::infinity());
    for (int round = 0; round < kRounds; ++round) {
      best[0] = std::min(best[0], seconds([&] { product.run_whole(); }));
      best[1] = std::min(best[1], seconds([&] { product.run_blocks(); }));
      best[2] = std::min(best[2], seconds([&] { product.run_kernels(); }));
    }
    const double flops = 2e-9 * static_cast<double>(m * n * k);
    fmt::print("{:>18} {:>10.1f} {:>12.1f} {:>24.1f} {:>12.1e}\n", fmt::format("{}, {}, {}", m, n, k), flops / best[0],
               flops / best[1], flops / best[2],
               std::max(largest_difference(product.whole, product.kernels),
                        largest_difference(product.whole, product.blocks)));
  }
}
