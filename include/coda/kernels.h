// For kernel files only: the explicit instantiations of programs. Each such file is compiled once per instruction set
// (coda_add_kernels in CMake), which defines CODA_ISA; the CPU engine chooses among them when it runs.
#pragma once
#include "coda/cpu/epilogue.h"

/// CODA_PROGRAM(MyProgram<Tensors<float>>): makes gemm and map with this program link.
#define CODA_PROGRAM(...) \
  template void coda::detail::epilogue<__VA_ARGS__, coda::isa::CODA_ISA>(const void*, const coda::detail::Block&)
