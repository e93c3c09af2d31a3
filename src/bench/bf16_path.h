// The same functions as PyTorch computes them in bf16 without fusion: a product rounded to bf16, and behind it elementwise
// operations, each of which computes in fp32 or better and rounds its result to bf16. What coda's errors are measured against.
//
// Programs are on the host with every tile as floats; products are accumulators in double. Outputs come back in the order of the
// program's Out fields, as oracle::apply has them: a sum over columns adds what was rounded, and is not rounded itself.
#pragma once
#include <vector>

#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "oracle/oracle.h"

namespace coda::bench {

using HostSide = Tensors<float>;
using Grids = std::vector<oracle::Grid<double>>;
using Accumulators = oracle::Grid<double>;

/// An fp32 output holds the bf16 product.
Grids bf16_path(const Accumulators& acc, const Store<HostSide>&);
inline Grids bf16_path(const Accumulators& acc, const Store<HostSide, float>&) {
  return bf16_path(acc, Store<HostSide>{});
}
/// The bf16 gradient is added to the fp32 one.
Grids bf16_path(const Accumulators& acc, const AccumulateInto<HostSide>& program);
Grids bf16_path(const Accumulators& acc, const Residual<HostSide>& program);
Grids bf16_path(const Accumulators& acc, const Residual<HostSide, GammaInEpilogue>& program);
Grids bf16_path(const Accumulators& acc, const RmsNormSwiGlu<HostSide, KeepGateUp>& program);
Grids bf16_path(const Accumulators& acc, const RmsNormSwiGlu<HostSide, DropGateUp>& program);
/// The rotation rounds once.
Grids bf16_path(const Accumulators& acc, const RmsNormRope<HostSide>& program);
Grids bf16_path(const Accumulators& acc, const CrossEntropy<HostSide, KeepLogits>& program);
Grids bf16_path(const Accumulators& acc, const CrossEntropy<HostSide, RecomputeLogits>& program);
/// The softmax's gradient rounds once.
Grids bf16_path(const Accumulators& acc, const CrossEntropyBackward<HostSide, RecomputeLogits>& program);
Grids bf16_path(const Accumulators& acc, const SwiGluBackward<HostSide>& program);
/// The norm's gradient rounds once.
Grids bf16_path(const Accumulators& acc, const RmsNormBackward<HostSide>& program);

}  // namespace coda::bench
