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

/// Neighbouring words to global memory in one access, aligned to its size. In PTX, since compilers cut stores of vector types into words
/// where an address is made of several terms.
__device__ __forceinline__ void store_words(void* p, uint32_t a, uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_words(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
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
