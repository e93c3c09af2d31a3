// The gated linear units that operators are asked for by number.
#pragma once
#include <cstdint>

#include "coda/programs/glu.h"

namespace coda::torch_ops {

/// body(function of gate and up): 0 SwiGLU, 1 GEGLU with erf, 2 with tanh, which layers have.
template <class Body>
auto with_glu(int64_t glu, const Body& body) {
  if (glu == 1) return body(GegluErf{});
  if (glu == 2) return body(GegluTanh{});
  return body(Swiglu{});
}
/// Or 3, gpt-oss's: with a limit and an alpha.
template <class Body>
auto with_glu(int64_t glu, double limit, double alpha, const Body& body) {
  if (glu == 3) return body(SwigluClamped{.limit = static_cast<float>(limit), .alpha = static_cast<float>(alpha)});
  return with_glu(glu, body);
}

}  // namespace coda::torch_ops
