// SwiGLU, the gated linear unit of a Llama: glu.h with y = silu(gate) · up.
#pragma once
#include "coda/programs/glu.h"

namespace coda {

template <class S = Tensors<bf16>, class Keep = KeepGateUp>
using RmsNormSwiGlu = RmsNormGlu<S, Swiglu, Keep>;

template <class S = Tensors<bf16>>
using SwiGluBackward = GluBackward<S, Swiglu>;

}  // namespace coda
