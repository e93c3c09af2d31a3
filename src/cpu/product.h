// The CPU engine: products block by block, each block handed to its epilogue program while it is hot in cache.
#pragma once
#include "coda/gemm.h"

namespace coda::cpu {

// Accumulators of a block: about 96 × 128 floats, 48 KB; with the panels of one part of the depth they stay in a 512 KB L2.
// 128 is the width of most partial reductions.
inline constexpr int64_t kRowBlock = 96;
inline constexpr int64_t kColBlock = 128;
// Rows whose last part of the depth is multiplied, and which the program then takes, at a time: what it reads and writes beside
// them is fetched meanwhile, and that of more rows would not all stay in the second-level cache.
inline constexpr int64_t kStrip = 48;
// Columns of b are packed this many words at a time: enough to spread over threads, small beside the tensors. Where they are fewer
// than b's, a is packed again for each such part.
inline constexpr int64_t kPackedWords = int64_t{8} << 20;

/// Neither checks anything; both factors and all operands fit.
void product(Cpu& cpu, const detail::Factor& a, const detail::Factor& b, const detail::ProgramInfo& program,
             const detail::CpuKernels& kernels);
void map_tile(Cpu& cpu, const detail::Factor& tile, const detail::ProgramInfo& program,
              const detail::CpuKernels& kernels);

}  // namespace coda::cpu
