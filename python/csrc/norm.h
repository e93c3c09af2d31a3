// The norm in front of a product whose input no product of coda's made.
#pragma once
#include "coda/finish.h"
#include "coda/programs/norm.h"
#include "engine.h"
#include "operand_shape.h"

namespace coda::torch_ops {

/// r [M] of the rows of h [M, d].
template <class Engine, class E>
Tensor inv_rms_of(Engine& engine, const Tensor& h, double eps) {
  const int64_t m = h.size(0), d = h.size(1);
  const Tensor partial = empty<float>(h, {coda::detail::row_slot_count(d), m});
  Tensor out = empty<float>(h, {m});
  map(engine, matrix<const E>(h, "h"), SumOfSquares<Tensors<E>>{.sum_sq = matrix<float>(partial, "partial")});
  inv_rms(engine, matrix<const float>(partial, "partial"), d, eps, vector<float>(out, "inv_rms"));
  return out;
}

}  // namespace coda::torch_ops
