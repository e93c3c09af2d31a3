// The innermost product, made at run time by LIBXSMM for one shape.
#pragma once
#include <cstdint>

namespace coda::cpu {

/// c[i][j] (+)= Σ_k a[i][k] · b[k][j] for i < rows, j < cols, k < depth; float, row-major. The sum over k is in ascending
/// order for every element, whatever rows and cols are, so that blocking does not change a bit.
class Microkernel {
 public:
  Microkernel(int64_t rows, int64_t cols, int64_t depth, int64_t a_stride, int64_t b_stride, int64_t c_stride,
              bool add);
  void operator()(const float* a, const float* b, float* c) const;

 private:
  using Jit = void (*)(const float*, const float*, float*);
  Jit jit_;  // null where LIBXSMM has nothing for this CPU or shape: plain loops then
  int64_t rows_, cols_, depth_, a_stride_, b_stride_, c_stride_;
  bool add_;
};

}  // namespace coda::cpu
