// cuBLAS' plain products, loaded when they are asked for.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>

#include <memory>
#include <string>
#include <vector>

#include "bench/library.h"
#include "bench/shared_library.h"
#include "device.h"

namespace coda::bench {

/// out = a·bᵀ + beta·out, out [m, n] of bf16 or fp32; packed factors a [m, k], b [n, k] of bf16, each stored transposed where the
/// form says so; fp32 accumulation.
struct DeviceProduct {
  Form form;
  int64_t m, n, k;
  bool fp32;
  float beta;
  const bf16* a;
  const bf16* b;
  void* out;
};

/// Both of cuBLAS' interfaces on one stream, with 64 MB of workspace.
class Cublas {
 public:
  /// Throws Error where there is none, with what to do.
  explicit Cublas(const Stream& stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// cublasGemmEx by its own heuristic.
  void operator()(const DeviceProduct& product) const;
  /// "13.0.2".
  std::string version() const;

  /// What cublasLt suggests for one shape, best guess first.
  class Suggestions {
   public:
    /// Throws Error if there are none.
    Suggestions(const Cublas& cublas, const DeviceProduct& product);
    int count() const { return static_cast<int>(algorithms_.size()); }
    /// product: of the same shape.
    void run(int suggestion, const DeviceProduct& product) const;

   private:
    template <class Handle>
    using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

    const Cublas& cublas_;
    Owned<cublasLtMatmulDesc_t> operation_;
    Owned<cublasLtMatrixLayout_t> first_, second_, out_;
    std::vector<cublasLtMatmulAlgo_t> algorithms_;
  };

 private:
  // Spelled out: the header has an overload for C++ besides the symbol.
  using GemmEx = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                                const void*, cudaDataType_t, int, const void*, cudaDataType_t, int, const void*, void*,
                                cudaDataType_t, int, cublasComputeType_t, cublasGemmAlgo_t);

  SharedLibrary lt_library_, library_;  // cublas needs the other
  const Stream& stream_;
  DeviceMemory workspace_;
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_handle_ = nullptr;
  GemmEx* gemm_;
  decltype(cublasLtMatmul)* lt_matmul_;
};

}  // namespace coda::bench
