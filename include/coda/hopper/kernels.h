// For .cu files only: the explicit instantiations of programs on the Hopper engine.
//
//   CODA_HOPPER_PROGRAM(TN, MyProgram<Tensors<bf16>>);         // x Wᵀ
//   CODA_HOPPER_PROGRAM(NN | NT, MyGradient<Tensors<bf16>>);   // dy W and dyᵀ x
//   CODA_HOPPER_PROGRAM(no_product, MyPass<Tensors<bf16>>);    // map only
//
// makes gemm and map with this program on a Gpu link. A form costs a kernel, ten seconds of nvcc.
#pragma once
#include "coda/hopper/map.h"
#include "coda/hopper/product.h"

#define CODA_HOPPER_PROGRAM(forms, ...) CODA_HOPPER_PROGRAM_ON(pingpong_128x128, forms, __VA_ARGS__)

/// With tiles of another kind (detail::HopperTile). A thread has 128 accumulators of a pingpong tile; a program that needs so many
/// registers beside them that the compiler keeps some in memory goes on cooperative_128x128, where it has 64.
#define CODA_HOPPER_PROGRAM_ON(tile, forms, ...) \
  CODA_HOPPER_PROGRAM_TILES(tile, forms, cooperative_128x256, no_product, __VA_ARGS__)

/// On pingpong_128x128, and in other_forms on tiles of other too: plans choose between them (src/hopper/plan.h).
#define CODA_HOPPER_PROGRAM_AND(other, other_forms, forms, ...) \
  CODA_HOPPER_PROGRAM_TILES(pingpong_128x128, forms, other, other_forms, __VA_ARGS__)

#define CODA_HOPPER_PROGRAM_TILES(tile, forms, other, other_forms, ...)                                         \
  template <>                                                                                                   \
  const coda::detail::HopperKernels& coda::detail::hopper_kernels<__VA_ARGS__>() {                              \
    using namespace coda::hopper;                                                                               \
    using enum coda::detail::HopperTile;                                                                        \
    static const auto products = product_kernels<__VA_ARGS__, (forms), tile, (other_forms), other>();           \
    static const coda::detail::HopperKernels kernels{products, &mapped::launch_map<__VA_ARGS__>, #__VA_ARGS__}; \
    return kernels;                                                                                             \
  }                                                                                                             \
  static_assert(true)
