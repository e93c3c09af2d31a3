// Which of the compiled instruction sets this process uses.
#pragma once
#include <string_view>

#include "coda/isa.h"

namespace coda::cpu {

enum class Isa { generic, avx2, avx512 };

/// The best one that this CPU has, or the one named by the environment variable CODA_CPU_ISA (generic, avx2, avx512).
/// Throws UsageError if that one is unknown or not to be had here. Decided once.
Isa chosen_isa();
std::string_view name(Isa isa);
/// Whether this CPU can run it.
bool runs_here(Isa isa);
/// For tests that go through all of them.
void choose_isa(Isa isa);

/// f(isa::avx2{}), or whatever chosen_isa() is.
template <class F>
auto for_chosen_isa(F&& f) {
  switch (chosen_isa()) {
    case Isa::avx2:
      return f(isa::avx2{});
    case Isa::avx512:
      return f(isa::avx512{});
    case Isa::generic:
      break;
  }
  return f(isa::generic{});
}

}  // namespace coda::cpu
