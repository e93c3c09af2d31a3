// The gated linear units that operators are asked for by number.
#pragma once
#include <cstdint>

#include "coda/programs/glu.h"

namespace coda::torch_ops {

/// body(function of gate and up): 0 SwiGLU, 1 GEGLU with erf, 2 with tanh.
template <class Body>
auto with_glu(int64_t glu, const Body& body) {
  if (glu == 1) return body(GegluErf{});
  if (glu == 2) return body(GegluTanh{});
  return body(Swiglu{});
}

}  // namespace coda::torch_ops
