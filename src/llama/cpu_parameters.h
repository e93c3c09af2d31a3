// The values of the parameters in this machine's memory, and their update.
#pragma once
#include <vector>

#include "buffer.h"
#include "coda/cpu.h"
#include "parameters.h"

namespace coda::llama {

using CpuParameters = std::vector<ParameterMemory<Cpu>>;  // as Parameters counts them

/// Masters and gradients NaN, moments 0.
CpuParameters allocate(const Parameters& parameters);

/// The matrices in the type and form that products read: folded, packed, rounded once from the masters. In float an
/// unfolded matrix is its master.
template <class E>
class Weights {
 public:
  Weights(const Parameters& parameters, CpuParameters& memory);
  Matrix<const E> matrix(int parameter) const { return views_[static_cast<size_t>(parameter)]; }
  /// Writes rows [first, first + count) of a matrix from its master.
  void write_rows(const Parameters& parameters, const CpuParameters& memory, int parameter, int64_t first,
                  int64_t count);
  void write_all(Cpu& cpu, const Parameters& parameters, const CpuParameters& memory);

 private:
  std::vector<Buffer<E>> copies_;
  std::vector<Matrix<const E>> views_;
};

/// One AdamW step on all parameters and their weights. Returns the norm of the gradients before clipping; if it is not
/// finite nothing changes. t counts from 1.
template <class E>
double adamw_update(Cpu& cpu, const Parameters& parameters, CpuParameters& memory, Weights<E>& weights,
                    const AdamW& options, int64_t t);

}  // namespace coda::llama
