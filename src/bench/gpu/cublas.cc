#include "cublas.h"

#include <fmt/format.h>

#include <array>

namespace coda::bench {

namespace {

constexpr int64_t kWorkspace = int64_t{64} << 20;
constexpr int kSuggestions = 16;

#define CODA_TEXT_(x) #x
#define CODA_TEXT(x) CODA_TEXT_(x)
#define CODA_CUBLAS_FILE(name) "lib" name ".so." CODA_TEXT(CUBLAS_VER_MAJOR)

constexpr const char* kRemedy = "coda bench --device cuda measures against it, so put the lib64 of CUDA " CODA_TEXT(
    CUBLAS_VER_MAJOR) " on LD_LIBRARY_PATH";

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw DeviceError(fmt::format("{} failed with cuBLAS' status {}", call, static_cast<int>(status)));
}

/// A factor as cuBLAS, which counts by columns, sees it. out [m, n] by rows is outᵀ by columns: b comes first.
struct ColumnMajor {
  cublasOperation_t operation;
  int64_t rows, cols;  // as it is stored
};
ColumnMajor first_of(const DeviceProduct& p) {
  return p.form == Form::TN ? ColumnMajor{CUBLAS_OP_T, p.k, p.n} : ColumnMajor{CUBLAS_OP_N, p.n, p.k};
}
ColumnMajor second_of(const DeviceProduct& p) {
  return p.form == Form::NT ? ColumnMajor{CUBLAS_OP_T, p.m, p.k} : ColumnMajor{CUBLAS_OP_N, p.k, p.m};
}
cudaDataType_t out_type(const DeviceProduct& p) {
  return p.fp32 ? CUDA_R_32F : CUDA_R_16BF;
}

}  // namespace

Cublas::Cublas(const Stream& stream)
    : lt_library_("cublasLt", {CODA_CUBLAS_FILE("cublasLt"), "/usr/local/cuda/lib64/" CODA_CUBLAS_FILE("cublasLt")},
                  kRemedy),
      library_("cuBLAS", {CODA_CUBLAS_FILE("cublas"), "/usr/local/cuda/lib64/" CODA_CUBLAS_FILE("cublas")}, kRemedy),
      stream_(stream),
      workspace_(kWorkspace),
      gemm_(library_.symbol<GemmEx>("cublasGemmEx")),
      lt_matmul_(lt_library_.symbol<decltype(cublasLtMatmul)>("cublasLtMatmul")) {
  // cublas_v2.h renames what it declares.
  check_cublas(library_.symbol<decltype(cublasCreate)>("cublasCreate_v2")(&handle_), "cublasCreate");
  check_cublas(library_.symbol<decltype(cublasSetStream)>("cublasSetStream_v2")(handle_, stream.get()),
               "cublasSetStream");
  check_cublas(library_.symbol<decltype(cublasSetWorkspace)>("cublasSetWorkspace_v2")(handle_, workspace_.as<void>(),
                                                                                      static_cast<size_t>(kWorkspace)),
               "cublasSetWorkspace");
  check_cublas(lt_library_.symbol<decltype(cublasLtCreate)>("cublasLtCreate")(&lt_handle_), "cublasLtCreate");
}

Cublas::~Cublas() {
  if (lt_handle_ != nullptr) lt_library_.symbol<decltype(cublasLtDestroy)>("cublasLtDestroy")(lt_handle_);
  if (handle_ != nullptr) library_.symbol<decltype(cublasDestroy)>("cublasDestroy_v2")(handle_);
}

std::string Cublas::version() const {
  const auto get = library_.symbol<decltype(cublasGetProperty)>("cublasGetProperty");
  std::array<int, 3> numbers{};
  check_cublas(get(MAJOR_VERSION, &numbers[0]), "cublasGetProperty");
  check_cublas(get(MINOR_VERSION, &numbers[1]), "cublasGetProperty");
  check_cublas(get(PATCH_LEVEL, &numbers[2]), "cublasGetProperty");
  return fmt::format("{}.{}.{}", numbers[0], numbers[1], numbers[2]);
}

void Cublas::operator()(const DeviceProduct& p) const {
  const ColumnMajor first = first_of(p), second = second_of(p);
  const float one = 1;
  check_cublas(gemm_(handle_, first.operation, second.operation, static_cast<int>(p.n), static_cast<int>(p.m),
                     static_cast<int>(p.k), &one, p.b, CUDA_R_16BF, static_cast<int>(first.rows), p.a, CUDA_R_16BF,
                     static_cast<int>(second.rows), &p.beta, p.out, out_type(p), static_cast<int>(p.n),
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
}

Cublas::Suggestions::Suggestions(const Cublas& cublas, const DeviceProduct& product)
    : cublas_(cublas),
      operation_(nullptr, cublas.lt_library_.symbol<decltype(cublasLtMatmulDescDestroy)>("cublasLtMatmulDescDestroy")),
      first_(nullptr, cublas.lt_library_.symbol<decltype(cublasLtMatrixLayoutDestroy)>("cublasLtMatrixLayoutDestroy")),
      second_(nullptr, first_.get_deleter()),
      out_(nullptr, first_.get_deleter()) {
  const SharedLibrary& lt = cublas.lt_library_;
  const auto new_layout = lt.symbol<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate");
  const auto set = lt.symbol<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  cublasLtMatmulDesc_t operation = nullptr;
  check_cublas(lt.symbol<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(&operation, CUBLAS_COMPUTE_32F,
                                                                                         CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  operation_.reset(operation);
  const auto layout = [&](cudaDataType_t type, int64_t rows, int64_t cols) {
    cublasLtMatrixLayout_t created = nullptr;
    check_cublas(new_layout(&created, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows),
                 "cublasLtMatrixLayoutCreate");
    return created;
  };
  const ColumnMajor first = first_of(product), second = second_of(product);
  check_cublas(set(operation, CUBLASLT_MATMUL_DESC_TRANSA, &first.operation, sizeof first.operation),
               "cublasLtMatmulDescSetAttribute");
  check_cublas(set(operation, CUBLASLT_MATMUL_DESC_TRANSB, &second.operation, sizeof second.operation),
               "cublasLtMatmulDescSetAttribute");
  first_.reset(layout(CUDA_R_16BF, first.rows, first.cols));
  second_.reset(layout(CUDA_R_16BF, second.rows, second.cols));
  out_.reset(layout(out_type(product), product.n, product.m));

  cublasLtMatmulPreference_t created = nullptr;
  check_cublas(lt.symbol<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(&created),
               "cublasLtMatmulPreferenceCreate");
  const Owned<cublasLtMatmulPreference_t> preference(
      created, lt.symbol<decltype(cublasLtMatmulPreferenceDestroy)>("cublasLtMatmulPreferenceDestroy"));
  const auto bytes = static_cast<uint64_t>(kWorkspace);
  check_cublas(lt.symbol<decltype(cublasLtMatmulPreferenceSetAttribute)>("cublasLtMatmulPreferenceSetAttribute")(
                   created, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
               "cublasLtMatmulPreferenceSetAttribute");
  std::array<cublasLtMatmulHeuristicResult_t, kSuggestions> found{};
  int count = 0;
  check_cublas(lt.symbol<decltype(cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
                   cublas.lt_handle_, operation, first_.get(), second_.get(), out_.get(), out_.get(), created,
                   kSuggestions, found.data(), &count),
               "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i)
    if (found[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
      algorithms_.push_back(found[static_cast<size_t>(i)].algo);
  if (algorithms_.empty()) throw DeviceError("cublasLt suggests nothing for this shape");
}

void Cublas::Suggestions::run(int suggestion, const DeviceProduct& p) const {
  const float one = 1;
  check_cublas(
      cublas_.lt_matmul_(cublas_.lt_handle_, operation_.get(), &one, p.b, first_.get(), p.a, second_.get(), &p.beta,
                         p.out, out_.get(), p.out, out_.get(), &algorithms_[static_cast<size_t>(suggestion)],
                         cublas_.workspace_.as<void>(), static_cast<size_t>(kWorkspace), cublas_.stream_.get()),
      "cublasLtMatmul");
}

}  // namespace coda::bench
