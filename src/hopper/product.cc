// The GPU engine: a fused kernel where TMA reaches everything, otherwise accumulators in the workspace and the program over them.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "align.h"
#include "call_check.h"
#include "coda/gpu.h"
#include "coda/programs/store.h"
#include "device_guard.h"
#include "operand_shape.h"
#include "plan.h"

namespace coda::detail {

namespace {

using hopper::DeviceGuard;
using hopper::Plan;

/// Rows and columns at the edge of a tile are counted in 32 bits.
constexpr int64_t kMostOfSide = (int64_t{1} << 31) - 512;

void check_factor(const std::string& name, const Factor& x) {
  if (x.element != ElementType::bfloat16) throw OperandError(name, "of float", "bf16: the GPU engine multiplies bf16");
  for (int64_t side : {x.rows, x.depth})
    if (side > kMostOfSide)
      throw OperandError(name, fmt::format("{} x {}", x.rows, x.depth),
                         fmt::format("at most {} rows and columns", kMostOfSide));
}

Form check_form(const Factor& a, const Factor& b, const HopperKernels& kernels) {
  const auto form = hopper::form_of(a, b);
  if (!form) throw OperandError("a", "transposed beside a b that is not", "the forms x Wᵀ, dy W or dyᵀ x on a GPU");
  for (const HopperKernel& kernel : kernels.products)
    if (kernel.form == *form) return *form;
  throw OperandError("b", fmt::format("part of a product of form {}", hopper::name(*form)),
                     "a form that CODA_HOPPER_PROGRAM names for this program");
}

int64_t round_up(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// The two passes' memory: what of the factors has to be copied, and the accumulators.
struct Workspace {
  int64_t a = 0, b = 0, accumulators = 0;
  int64_t bytes() const { return a + b + accumulators; }
};
int64_t copy_bytes(const char* name, const Factor& x) {
  if (hopper::obstacle(name, x).empty()) return 0;
  const int64_t rows = x.transposed ? x.depth : x.rows, cols = x.transposed ? x.rows : x.depth;
  return round_up(rows * hopper::aligned_stride(cols) * int64_t{sizeof(bf16)});
}
Workspace workspace_of(const Factor& a, const Factor& b) {
  const int64_t stride = (b.rows + 3) / 4 * 4;
  return {.a = copy_bytes("a", a),
          .b = copy_bytes("b", b),
          .accumulators = round_up(a.rows * stride * int64_t{sizeof(float)})};
}

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
                                    .swizzle = plan.swizzle,
                                    .along_m = plan.along_m}));
}

Factor aligned(const Gpu& gpu, const char* name, const Factor& x, std::byte* memory) {
  if (hopper::obstacle(name, x).empty()) return x;
  const int64_t rows = x.transposed ? x.depth : x.rows, cols = x.transposed ? x.rows : x.depth;
  auto* copy = reinterpret_cast<bf16*>(memory);
  check_launch(hopper::copy_aligned(static_cast<const bf16*>(x.data), x.stride, rows, cols, copy, gpu.stream()));
  Factor moved = x;
  moved.data = copy;
  moved.stride = hopper::aligned_stride(cols);
  return moved;
}

void run_in_two_passes(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                       const HopperKernels& kernels) {
  const Workspace need = workspace_of(a, b);
  auto* memory = static_cast<std::byte*>(gpu.workspace());
  const int64_t m = a.rows, n = b.rows, stride = (n + 3) / 4 * 4;
  const Matrix<float> accumulators(reinterpret_cast<float*>(memory + need.a + need.b), m, n, stride);
  if (a.depth == 0) {
    hopper::check(cudaMemsetAsync(accumulators.data, 0, static_cast<size_t>(m * stride) * sizeof(float), gpu.stream()),
                  "cudaMemsetAsync");
  } else {
    const Factor moved_a = aligned(gpu, "a", a, memory), moved_b = aligned(gpu, "b", b, memory + need.a);
    const Store<Tensors<bf16>, float> store{.out = accumulators};
    with_program(store, [&](const ProgramInfo& info) {
      launch(gpu, moved_a, moved_b, &store,
             hopper::choose(moved_a, moved_b, info, hopper_kernels<Store<Tensors<bf16>, float>>()));
    });
  }
  check_launch(kernels.map({.x = factor(accumulators),
                            .operands = program.operands,
                            .program = program.program,
                            .stream = gpu.stream(),
                            .multiprocessors = gpu.multiprocessors()}));
}

}  // namespace

int64_t product_workspace(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels) {
  check_factor("a", a);
  check_factor("b", b);
  check_form(a, b, kernels);
  if (a.rows == 0 || b.rows == 0 || hopper::choose(a, b, program, kernels).kernel != nullptr) return 0;
  return workspace_of(a, b).bytes();
}

void run_product(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                 const HopperKernels& kernels) {
  check_product(a, b, program);
  check_factor("a", a);
  check_factor("b", b);
  check_form(a, b, kernels);
  if (a.rows == 0 || b.rows == 0) return;  // no accumulators, and outputs of no elements
  const Plan plan = hopper::choose(a, b, program, kernels);
  const DeviceGuard guard(gpu.device());
  if (plan.kernel != nullptr) {
    launch(gpu, a, b, program.program, plan);
    return;
  }
  const int64_t bytes = workspace_of(a, b).bytes();
  if (gpu.workspace_bytes() < bytes)
    throw OperandError("workspace", fmt::format("{} bytes", gpu.workspace_bytes()),
                       fmt::format("{} bytes, since {} and the product runs in two passes", bytes, plan.reason));
  run_in_two_passes(gpu, a, b, program, kernels);
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
