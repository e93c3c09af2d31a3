#include "microkernel.h"

#include <libxsmm.h>

#include <limits>

namespace coda::cpu {

namespace {

bool fits(int64_t x) {
  return x <= std::numeric_limits<libxsmm_blasint>::max();
}

}  // namespace

Microkernel::Microkernel(int64_t rows, int64_t cols, int64_t depth, int64_t a_stride, int64_t b_stride,
                         int64_t c_stride, bool add)
    : jit_(nullptr),
      rows_(rows),
      cols_(cols),
      depth_(depth),
      a_stride_(a_stride),
      b_stride_(b_stride),
      c_stride_(c_stride),
      add_(add) {
  if (!fits(a_stride) || !fits(b_stride) || !fits(c_stride)) return;
  // LIBXSMM is column-major: cᵀ = bᵀ aᵀ, and a row-major matrix is its own transpose there.
  const libxsmm_blasint lda = static_cast<libxsmm_blasint>(b_stride), ldb = static_cast<libxsmm_blasint>(a_stride),
                        ldc = static_cast<libxsmm_blasint>(c_stride);
  const float alpha = 1, beta = add ? 1 : 0;
  const int flags = LIBXSMM_GEMM_FLAG_NONE, prefetch = LIBXSMM_GEMM_PREFETCH_NONE;
  const libxsmm_smmfunction kernel =
      libxsmm_smmdispatch(static_cast<libxsmm_blasint>(cols), static_cast<libxsmm_blasint>(rows),
                          static_cast<libxsmm_blasint>(depth), &lda, &ldb, &ldc, &alpha, &beta, &flags, &prefetch);
  jit_ = reinterpret_cast<Jit>(kernel);
}

void Microkernel::operator()(const float* a, const float* b, float* c) const {
  if (jit_ != nullptr) return jit_(b, a, c);
  for (int64_t i = 0; i < rows_; ++i) {
    float* row = c + i * c_stride_;
    if (!add_)
      for (int64_t j = 0; j < cols_; ++j) row[j] = 0;
    for (int64_t k = 0; k < depth_; ++k) {
      const float x = a[i * a_stride_ + k];
      const float* y = b + k * b_stride_;
      for (int64_t j = 0; j < cols_; ++j) row[j] += x * y[j];
    }
  }
}

}  // namespace coda::cpu
