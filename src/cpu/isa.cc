#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <string>

#include "coda/error.h"

namespace coda::cpu {

namespace {

Isa decide() {
  const char* wanted = std::getenv("CODA_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return instruction_sets().back();
  for (Isa isa : kIsas) {
    if (name(isa) != wanted) continue;
    if (!runs_here(isa)) throw UsageError(std::string("CODA_CPU_ISA is ") + wanted + "; this CPU does not have it");
    return isa;
  }
  throw UsageError(std::string("CODA_CPU_ISA is ") + wanted + "; it needs generic, avx2, avx512 or avx512_bf16");
}

std::atomic<int>& choice() {
  static std::atomic<int> isa{static_cast<int>(decide())};
  return isa;
}

}  // namespace

Isa chosen_isa() {
  return static_cast<Isa>(choice().load(std::memory_order_relaxed));
}

void choose_isa(Isa isa) {
  if (!runs_here(isa)) throw UsageError(std::string(name(isa)) + " is not an instruction set of this CPU");
  choice() = static_cast<int>(isa);
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::generic:
      return "generic";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
  }
  return "";
}

bool runs_here(Isa isa) {
  switch (isa) {
    case Isa::generic:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    case Isa::avx512:
      return runs_here(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return runs_here(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}

std::vector<Isa> instruction_sets() {
  std::vector<Isa> sets;
  std::ranges::copy_if(kIsas, std::back_inserter(sets), runs_here);
  return sets;
}

}  // namespace coda::cpu
