#include "optimizer_rows.h"

#include "cpu/isa.h"

namespace coda::llama {

namespace {

template <class Isa>
OptimizerRows rows() {
  return {&unfold_row<Isa>, &sum_of_squares<Isa>, &adamw_row<Isa>, &fold_row<Isa, float>, &fold_row<Isa, bf16>};
}

}  // namespace

OptimizerRows optimizer_rows() {
  return cpu::for_chosen_isa([](auto isa) { return rows<decltype(isa)>(); });
}

}  // namespace coda::llama
