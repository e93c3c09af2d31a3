#include "explain/compiled.h"

// Every file of src/kernels that is compiled by nvcc; a test holds this list to the folder.
#include "kernels/activation.cu"
#include "kernels/cross_entropy.cu"
#include "kernels/cross_entropy_backward.cu"
#include "kernels/glu.cu"
#include "kernels/head_norm.cu"
#include "kernels/layer_norm.cu"
#include "kernels/norm.cu"
#include "kernels/rope.cu"
#include "kernels/store.cu"
#include "kernels/swiglu.cu"

namespace coda::explain {

namespace {

std::vector<Compiled>& list() {
  static std::vector<Compiled> all;
  return all;
}

}  // namespace

std::span<const Compiled> compiled() {
  return list();
}

bool listing::add(std::string_view name, coda::detail::HopperTile tile, unsigned forms, coda::detail::HopperTile other,
                  unsigned other_forms) {
  using coda::detail::Form;
  Compiled program{.name = name, .products = {}};
  const auto add_forms = [&](coda::detail::HopperTile of, unsigned bits) {
    for (const auto& [form, bit] : {std::pair(Form::TN, TN), std::pair(Form::NN, NN), std::pair(Form::NT, NT)})
      if ((bits & bit) != 0) program.products.push_back({form, of, nullptr});
  };
  add_forms(tile, forms);
  add_forms(other, other_forms);
  list().push_back(std::move(program));
  return true;
}

}  // namespace coda::explain
