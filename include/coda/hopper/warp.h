// What products and maps of the Hopper engine share: rounding in pairs, and the operations that reductions over a warp are made of.
#pragma once
#include <cstdint>
#include <limits>

#include "coda/math.h"

namespace coda::hopper {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

/// Two values rounded to nearest even, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

struct AddUp {
  static constexpr float identity = 0;
  // Never made one with a product in front: where a compiler does that depends on the code around, and the bits would on the tile.
  static __device__ __forceinline__ float combine(float a, float b) { return __fadd_rn(a, b); }
};
struct Largest {
  static constexpr float identity = -std::numeric_limits<float>::infinity();
  static __device__ __forceinline__ float combine(float a, float b) { return max(a, b); }
};

}  // namespace coda::hopper
