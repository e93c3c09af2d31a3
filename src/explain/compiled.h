// What the GPU half compiles: every program of src/kernels/*.cu with the forms and tiles that it is compiled for, known without
// CUDA. compiled.cc reads those files with cu/coda/hopper/kernels.h in the place of the header that they include.
#pragma once
#include <span>
#include <string_view>
#include <vector>

#include "coda/gpu.h"

namespace coda::explain {

struct Compiled {
  std::string_view name;                             // as CODA_HOPPER_PROGRAM spells it
  std::vector<coda::detail::HopperKernel> products;  // that cannot be launched; none of a program that is a map only

  coda::detail::HopperKernels kernels() const { return {products, nullptr, name}; }
};
std::span<const Compiled> compiled();

/// What the macros of cu/coda/hopper/kernels.h expand to: forms are bits of TN, NN and NT.
namespace listing {
inline constexpr unsigned TN = 1, NN = 2, NT = 4, no_product = 0;
bool add(std::string_view name, coda::detail::HopperTile tile, unsigned forms, coda::detail::HopperTile other,
         unsigned other_forms);
}  // namespace listing

}  // namespace coda::explain
