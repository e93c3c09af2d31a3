// Accumulators of a product in slices of its depth, for products of fewer tiles than the GPU has multiprocessors.
#pragma once
#include <cstdint>

#include "coda/gpu.h"

namespace coda::hopper {

/// Rows of a cluster of its tiles, and the depth of a stage of their main loop.
inline constexpr int64_t kSliceClusterRows = 256, kSliceStage = 64;

/// Stages that a depth of k has: as many slices as there can be.
constexpr int64_t stages_of(int64_t k) {
  return (k + kSliceStage - 1) / kSliceStage;
}
/// Rows of each slice's accumulators: whole clusters of tiles.
constexpr int64_t slice_rows(int64_t m) {
  return (m + kSliceClusterRows - 1) / kSliceClusterRows * kSliceClusterRows;
}

/// One launch: accumulators of slice i at row i · slice_rows(m), rows of n elements `stride` apart. Factors are aligned as TMA needs it.
struct SlicedProduct {
  coda::detail::Factor a, b;
  int slices;  // from 1 to stages_of(k)
  float* accumulators;
  int64_t stride;  // a multiple of 4
  Gpu::Stream stream;
  int device, multiprocessors;
};
/// Both return a cudaError_t.
int multiply_slices(coda::detail::Form form, const SlicedProduct& product);
/// Adds the accumulators of slice 1, 2, … to those of slice 0, in this order.
int add_slices(const SlicedProduct& product);

}  // namespace coda::hopper
