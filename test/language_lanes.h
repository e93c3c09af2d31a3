// What language_kernels.cc computes on the lanes of each instruction set, for language_test.cc to look at.
#pragma once
#include <cstdint>

#include "coda/tensor.h"

namespace coda::test {

enum class Function { exp, log, sqrt, tanh, erf, rint, abs, sigmoid, silu, d_silu, d_tanh, cos, sin, round_to_bf16 };
enum class Function3 { fma, min, max, select_less, add, subtract, multiply, divide, rotation_cos, rotation_sin };

template <class Isa>
struct OnLanes {
  static void apply(Function f, const float* x, float* y, int64_t n);
  static void apply(Function3 f, const float* a, const float* b, const float* c, float* y, int64_t n);
  static void load(const bf16* x, float* y, int64_t n);
  static void store(const float* x, bf16* y, int64_t n);
};

}  // namespace coda::test
