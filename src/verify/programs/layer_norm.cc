#include "coda/programs/layer_norm.h"
#include "verify/programs.h"

namespace coda::verify {

namespace {

template <class S>
void add(Programs& programs) {
  programs.add<ResidualMoments<S>>({{"h", "residual"}});
  programs.add<LayerNorm<S>>();
  programs.add<LayerNormUpstream<S>>();
  programs.add<LayerNormBackward<S>>({{"d_h", "d_residual"}});
  programs.add<LayerNormBackward<S, StreamEnds>>({{"d_h", "h"}});
}

}  // namespace

void add_layer_norm(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
  programs.add<CentredWeightGradient<Tensors<float>>>();
}

}  // namespace coda::verify
