#include "llama/layer.h"

#include "llama/gpu/engine.h"
#include "llama/layer_rows.h"

namespace coda::llama {

CODA_LAYER(Gpu, bf16)

}  // namespace coda::llama
