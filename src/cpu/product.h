// The CPU engine: products block by block, each block handed to its epilogue program while it is hot in cache.
#pragma once
#include "coda/gemm.h"

namespace coda::cpu {

/// Neither checks anything; both factors and all operands fit.
void product(Cpu& cpu, const detail::Factor& a, const detail::Factor& b, const detail::ProgramInfo& program);
void map_tile(Cpu& cpu, const detail::Factor& tile, const detail::ProgramInfo& program);

}  // namespace coda::cpu
