// Which of the compiled instruction sets this process uses.
#pragma once
#include <array>
#include <string_view>
#include <vector>

#include "coda/isa.h"

namespace coda::cpu {

/// avx512_bf16: avx512, and products of bf16 factors by its own instruction (AVX512-BF16) in place of converted floats.
enum class Isa { generic, avx2, avx512, avx512_bf16 };
inline constexpr std::array kIsas{Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16};

/// The best one that this CPU has, or the one named by the environment variable CODA_CPU_ISA (generic, avx2, avx512, avx512_bf16).
/// Throws UsageError if that one is unknown or not to be had here. Decided once.
Isa chosen_isa();
std::string_view name(Isa isa);
/// Whether this CPU can run it.
bool runs_here(Isa isa);
/// Those that it can run, the best one last.
std::vector<Isa> instruction_sets();
/// For tests that go through all of them.
void choose_isa(Isa isa);

/// f(isa::avx2{}), or whatever programs are compiled for that chosen_isa() runs.
template <class F>
auto for_chosen_isa(F&& f) {
  switch (chosen_isa()) {
    case Isa::avx2:
      return f(isa::avx2{});
    case Isa::avx512:
    case Isa::avx512_bf16:
      return f(isa::avx512{});
    case Isa::generic:
      break;
  }
  return f(isa::generic{});
}

}  // namespace coda::cpu
