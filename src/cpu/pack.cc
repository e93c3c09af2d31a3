#include "pack.h"

#include "isa.h"

namespace coda::cpu {

Packing packing() {
  switch (chosen_isa()) {
    case Isa::avx2:
      return {&pack_columns<isa::avx2>, &pack_rows<isa::avx2>};
    case Isa::avx512:
      return {&pack_columns<isa::avx512>, &pack_rows<isa::avx512>};
    case Isa::generic:
      break;
  }
  return {&pack_columns<isa::generic>, &pack_rows<isa::generic>};
}

}  // namespace coda::cpu
