// How the CPU engine would run a program, and why.
#pragma once
#include <string>
#include <vector>

#include "explain/programs.h"

namespace coda::explain {

struct Decision {
  std::string what, choice, reason;
};

/// What src/cpu/product.h and the instruction set of this process decide.
std::vector<Decision> cpu_plan(const Program& program, int threads);

}  // namespace coda::explain
