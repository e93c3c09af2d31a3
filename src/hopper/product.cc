// The GPU engine: a fused kernel where TMA reaches everything, otherwise accumulators in the workspace and the program over them.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>

#include "align.h"
#include "call_check.h"
#include "coda/gpu.h"
#include "coda/programs/store.h"
#include "device_guard.h"
#include "plan_cache.h"
#include "product.h"
#include "sliced_product.h"

namespace coda::detail {

namespace {

using hopper::DeviceGuard;
using hopper::Plan;

void check_launch(int error) {
  hopper::check(static_cast<cudaError_t>(error), "launching a product");
}

void launch(const Gpu& gpu, const Factor& a, const Factor& b, const void* program, const Plan& plan) {
  check_launch(plan.kernel->launch({.a = a,
                                    .b = b,
                                    .program = program,
                                    .stream = gpu.stream(),
                                    .device = gpu.device(),
                                    .multiprocessors = gpu.multiprocessors(),
                                    .band = plan.band,
                                    .early = false}));  // verified, and no faster (docs/measurements.md)
}

/// x, or its copy in memory.
Factor aligned(const Gpu& gpu, const char* name, const Factor& x, std::byte* memory) {
  if (hopper::obstacle(name, x).empty()) return x;
  const auto [rows, cols] = hopper::stored_size(x);
  auto* copy = reinterpret_cast<bf16*>(memory);
  check_launch(hopper::copy_aligned(static_cast<const bf16*>(x.data), x.stride, rows, cols, copy, gpu.stream()));
  Factor moved = x;
  moved.data = copy;
  moved.stride = hopper::aligned_stride(cols);
  return moved;
}

void run_in_two_passes(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                       const HopperKernels& kernels, int slices) {
  const hopper::Workspace need = hopper::workspace_of(a, b, slices);
  auto* memory = static_cast<std::byte*>(gpu.workspace());
  const int64_t m = a.rows, n = b.rows, stride = hopper::accumulator_stride(n);
  const Matrix<float> accumulators(reinterpret_cast<float*>(memory + need.a + need.b), m, n, stride);
  if (a.depth == 0) {
    hopper::check(cudaMemsetAsync(accumulators.data, 0, static_cast<size_t>(m * stride) * sizeof(float), gpu.stream()),
                  "cudaMemsetAsync");
  } else {
    const Factor moved_a = aligned(gpu, "a", a, memory), moved_b = aligned(gpu, "b", b, memory + need.a);
    if (slices > 1) {
      const hopper::SlicedProduct sliced{.a = moved_a,
                                         .b = moved_b,
                                         .slices = slices,
                                         .accumulators = accumulators.data,
                                         .stride = stride,
                                         .stream = gpu.stream(),
                                         .device = gpu.device(),
                                         .multiprocessors = gpu.multiprocessors()};
      check_launch(hopper::multiply_slices(*hopper::form_of(a, b), sliced));
      check_launch(hopper::add_slices(sliced));
    } else {
      // What is written past the last column is the workspace's too.
      const Store<Tensors<bf16>, float> store{.out = accumulators};
      launch(gpu, moved_a, moved_b, &store,
             hopper::untuned({.form = *hopper::form_of(a, b),
                              .shape = {m, n, a.depth},
                              .epilogue_tiles = 1,
                              .multiprocessors = gpu.multiprocessors()},
                             hopper_kernels<Store<Tensors<bf16>, float>>()));
    }
  }
  check_launch(kernels.map({.x = factor(accumulators),
                            .operands = program.operands,
                            .program = program.program,
                            .stream = gpu.stream(),
                            .multiprocessors = gpu.multiprocessors()}));
}

}  // namespace

int64_t product_workspace(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels,
                          DepthSlices asked) {
  hopper::check_factors(a, b, kernels);
  const int slices = hopper::slices_of(a, asked);
  if (a.rows == 0 || b.rows == 0 || (slices <= 1 && hopper::choose(a, b, program, kernels).kernel != nullptr)) return 0;
  return hopper::workspace_of(a, b, slices).bytes();
}

void run_product(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                 const HopperKernels& kernels, DepthSlices asked) {
  check_product(a, b, program);
  hopper::check_factors(a, b, kernels);
  const int slices = hopper::slices_of(a, asked);
  if (a.rows == 0 || b.rows == 0) return;  // no accumulators, and outputs of no elements
  Plan plan;
  if (slices == 1)
    plan = hopper::choose(a, b, program, kernels, gpu.multiprocessors(), gpu.name(), hopper::tuned_plans());
  const DeviceGuard guard(gpu.device());
  if (plan.kernel != nullptr) {
    launch(gpu, a, b, program.program, plan);
    return;
  }
  const int64_t bytes = hopper::workspace_of(a, b, slices).bytes();
  if (gpu.workspace_bytes() < bytes)
    throw OperandError("workspace", fmt::format("{} bytes", gpu.workspace_bytes()),
                       slices > 1
                           ? fmt::format("{} bytes for its {} slices", bytes, slices)
                           : fmt::format("{} bytes, since {} and the product runs in two passes", bytes, plan.reason));
  run_in_two_passes(gpu, a, b, program, kernels, slices);
}

DepthSlices choose_slices(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                          const HopperKernels& kernels) {
  hopper::check_factors(a, b, kernels);
  return {hopper::best_slices(hopper::problem_of(a, b, program, gpu.multiprocessors()))};
}

void run_map(const Gpu& gpu, const Factor& tile, const ProgramInfo& program, const HopperKernels& kernels) {
  check_map(tile, program);
  if (tile.rows == 0 || tile.depth == 0) return;
  const DeviceGuard guard(gpu.device());
  check_launch(kernels.map({.x = tile,
                            .operands = program.operands,
                            .program = program.program,
                            .stream = gpu.stream(),
                            .multiprocessors = gpu.multiprocessors()}));
}

}  // namespace coda::detail

namespace coda::hopper {

void run_fused(const Gpu& gpu, const coda::detail::Factor& a, const coda::detail::Factor& b,
               const coda::detail::ProgramInfo& program, const Plan& plan) {
  const DeviceGuard guard(gpu.device());
  coda::detail::launch(gpu, a, b, program.program, plan);
}

}  // namespace coda::hopper
