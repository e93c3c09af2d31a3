// What every engine refuses before it writes anything.
#pragma once
#include "coda/gemm.h"

namespace coda::detail {

/// Throws OperandError (or OverlapError) for factors that do not fit each other, and for operands whose shape, stride, address or
/// overlap the program cannot take.
void check_product(const Factor& a, const Factor& b, const ProgramInfo& program);
void check_map(const Factor& tile, const ProgramInfo& program);

}  // namespace coda::detail
