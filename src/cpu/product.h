// The CPU engine: products block by block, each block handed to its epilogue program while it is hot in cache.
#pragma once
#include "coda/gemm.h"

namespace coda::cpu {

// Columns of a block: the width of most partial reductions.
inline constexpr int64_t kColBlock = 128;
// Columns of b are packed this many words at a time: enough to spread over threads, small beside the tensors. Where they are fewer
// than b's, a is packed again for each such part.
inline constexpr int64_t kPackedWords = int64_t{8} << 20;

/// Neither checks anything; both factors and all operands fit.
void product(Cpu& cpu, const detail::Factor& a, const detail::Factor& b, const detail::ProgramInfo& program,
             const detail::CpuKernels& kernels);
void map_tile(Cpu& cpu, const detail::Factor& tile, const detail::ProgramInfo& program,
              const detail::CpuKernels& kernels);

}  // namespace coda::cpu
