// The instruction sets that the CPU engine is compiled for and chooses from at run time.
#pragma once

namespace coda::isa {
struct generic {};  // the x86-64 baseline, SSE2
struct avx2 {};     // with FMA and BMI2
struct avx512 {};   // F, BW, DQ, VL
}  // namespace coda::isa
