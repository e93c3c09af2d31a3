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
  switch (cpu::chosen_isa()) {
    case cpu::Isa::avx2:
      return rows<isa::avx2>();
    case cpu::Isa::avx512:
      return rows<isa::avx512>();
    case cpu::Isa::generic:
      break;
  }
  return rows<isa::generic>();
}

}  // namespace coda::llama
