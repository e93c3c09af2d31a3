// For .cu files only: the explicit instantiations of programs on the Hopper engine.
//
//   CODA_HOPPER_PROGRAM(TN, MyProgram<Tensors<bf16>>);         // x Wᵀ
//   CODA_HOPPER_PROGRAM(NN | NT, MyGradient<Tensors<bf16>>);   // dy W and dyᵀ x
//   CODA_HOPPER_PROGRAM(no_product, MyPass<Tensors<bf16>>);    // map only
//
// makes gemm and map with this program on a Gpu link. Each form costs a kernel for every tile, half a minute of nvcc in all.
#pragma once
#include "coda/hopper/map.h"
#include "coda/hopper/product.h"

#define CODA_HOPPER_PROGRAM(forms, ...)                                                           \
  template <>                                                                                     \
  const coda::detail::HopperKernels& coda::detail::hopper_kernels<__VA_ARGS__>() {                \
    using namespace coda::hopper;                                                                 \
    static const auto products = product_kernels<__VA_ARGS__, (forms)>();                         \
    static const coda::detail::HopperKernels kernels{products, &mapped::launch_map<__VA_ARGS__>}; \
    return kernels;                                                                               \
  }                                                                                               \
  static_assert(true)
