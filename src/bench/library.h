// The plain products of libraries, which coda's programs are measured against.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "coda/cpu.h"
#include "shared_library.h"

namespace coda::bench {

/// How the factors of out = a·bᵀ lie in memory: x Wᵀ, dy W, dyᵀ x.
enum class Form { TN, NN, NT };
const char* name(Form form);

/// out [m, n] (fp32) of packed fp32 factors: a [m, k], b [n, k], each stored transposed where the form says so.
struct Product {
  Form form;
  int64_t m, n, k;
  const float* a;
  const float* b;
  float* out;
};

/// OpenBLAS, loaded when it is asked for: linked, it would start its threads in every command.
class OpenBlas {
 public:
  /// Throws Error with the package to install where there is none.
  explicit OpenBlas(int threads);
  void operator()(const Product& product) const;
  /// The kernels that it chose, "Zen".
  const std::string& core() const { return core_; }

 private:
  using Sgemm = void(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
                     int lda, const float* b, int ldb, float beta, float* c, int ldc);

  SharedLibrary library_;
  Sgemm* sgemm_;
  std::string core_;
};

/// LIBXSMM's run-time kernels over blocks of 96 × 128 × 256, b packed in panels, on the threads of cpu.
class Libxsmm {
 public:
  explicit Libxsmm(Cpu& cpu) : cpu_(cpu) {}
  void operator()(const Product& product);

 private:
  Cpu& cpu_;
  std::unique_ptr<float[]> packed_;
  int64_t packed_size_ = 0;
};

}  // namespace coda::bench
