// Fused products by a plan that somebody else chose: tuning and verification.
#pragma once
#include "hopper/plan.h"

namespace coda::hopper {

/// The call has been checked, and the plan is one of its candidates.
void run_fused(const Gpu& gpu, const coda::detail::Factor& a, const coda::detail::Factor& b,
               const coda::detail::ProgramInfo& program, const Plan& plan);

}  // namespace coda::hopper
