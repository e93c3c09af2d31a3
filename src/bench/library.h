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

class Library {
 public:
  virtual ~Library() = default;
  virtual std::string name() const = 0;
  virtual void operator()(const Product& product) = 0;
};

/// OpenBLAS, loaded when it is asked for: linked, it would start its threads in every command.
class OpenBlas : public Library {
 public:
  /// Throws Error with the package to install where there is none.
  explicit OpenBlas(int threads);
  std::string name() const override { return "OpenBLAS"; }
  void operator()(const Product& product) override;
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
class Libxsmm : public Library {
 public:
  explicit Libxsmm(Cpu& cpu) : cpu_(cpu) {}
  std::string name() const override { return "LIBXSMM"; }
  void operator()(const Product& product) override;

 private:
  Cpu& cpu_;
  std::unique_ptr<float[]> packed_;
  int64_t packed_size_ = 0;
};

/// torch.mm, by the stable C functions of PyTorch (torch/csrc/inductor/aoti_torch/c/shim.h).
class TorchMm : public Library {
 public:
  /// file: libtorch_cpu.so. Throws Error where it cannot be loaded.
  TorchMm(const std::string& file, int threads);
  std::string name() const override { return "torch.mm"; }
  void operator()(const Product& product) override;

 private:
  struct Tensor;
  using MakeTensor = int32_t(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                             int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                             Tensor** tensor);

  Tensor* tensor(const float* data, int64_t rows, int64_t cols, bool transposed) const;

  SharedLibrary library_;
  MakeTensor* make_;
  int32_t (*free_)(Tensor*);
  int32_t (*mm_out_)(Tensor* out, Tensor* a, Tensor* b);
  int32_t float32_, cpu_device_;
};

}  // namespace coda::bench
