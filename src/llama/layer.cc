#include "layer.h"

#include "coda/gemm.h"
#include "layer_rows.h"

namespace coda::llama {

CODA_LAYER(Cpu, float)
CODA_LAYER(Cpu, bf16)

}  // namespace coda::llama
