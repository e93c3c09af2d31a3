// Reductions over the slots of a column of partials, on a GPU. For files that nvcc compiles.
//
// A block has 32 columns. Its 16 warps take a sixteenth of the slots each, in ascending order, and the sixteenths are
// combined in ascending order: what is added to what depends on the number of slots only.
#pragma once
#include "coda/operands.h"
#include "hopper/launch.h"

namespace coda::hopper {

inline constexpr int kColumns = 32, kParts = 16;

/// Where a thread stands: a column, and the slots [begin, end) of it.
struct Part {
  int64_t column, begin, end;

  __device__ Part(int64_t slots, int64_t columns) {
    const int64_t each = ceil_div(slots, kParts);
    column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
    begin = min(each * threadIdx.y, slots);
    end = column < columns ? min(begin + each, slots) : begin;  // a thread past the last column sees no slots
  }
  /// One of the threads of a column has its results.
  __device__ bool stores(int64_t columns) const { return threadIdx.y == 0 && column < columns; }
};

/// Combines one value per part, in ascending order; every thread of a column gets the result.
template <class Combine>
__device__ double combine_parts(double value, Combine combine) {
  __shared__ double parts[kParts][kColumns];
  __syncthreads();  // the last call's results have been read
  parts[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  double all = parts[0][threadIdx.x];
  for (int i = 1; i < kParts; ++i) all = combine(all, parts[i][threadIdx.x]);
  return all;
}
/// Σ over the slots of a column of value(slot).
template <class F>
__device__ double sum_slots(const Part& part, F value) {
  double sum = 0;
#pragma unroll 4
  for (int64_t slot = part.begin; slot < part.end; ++slot) sum += value(slot);
  return combine_parts(sum, [](double a, double b) { return a + b; });
}

/// log Σ exp over everything that the slots of a column have seen; -inf without any.
__device__ inline double log_sum_exp_of_slots(const Part& part, const Matrix<const MaxSum>& states) {
  const double kNone = -__longlong_as_double(0x7ff0000000000000);
  // As std::max, also in what it does with a NaN.
  const auto larger = [](double a, double b) { return a < b ? b : a; };
  double largest = kNone;
#pragma unroll 4
  for (int64_t slot = part.begin; slot < part.end; ++slot)
    largest = larger(largest, static_cast<double>(states(slot, part.column).max));
  const double top = combine_parts(largest, larger);
  const double sum = sum_slots(part, [&](int64_t slot) {
    const MaxSum state = states(slot, part.column);
    // exp(-inf - -inf) would be NaN; a slot that saw nothing adds nothing. A NaN maximum stays one.
    const double max = static_cast<double>(state.max);
    return max == kNone ? 0 : static_cast<double>(state.sum) * exp(max - top);
  });
  return top + log(sum);
}

}  // namespace coda::hopper
