#include <algorithm>

#include "coda/hopper/product.h"
#include "coda/programs/store.h"
#include "hopper/plan.h"
#include "hopper/sliced_product.h"
#include "hopper/slices.h"

namespace coda::hopper {

namespace {

template <Form kForm>
int launch(const SlicedProduct& product) {
  using P = Store<Tensors<bf16>, float>;
  constexpr HopperTile kTile = HopperTile::cooperative_128x256;
  using Plain = Product<P, kForm, kTile>;
  using Tile = TileTraits<kTile>;
  static_assert(kSliceClusterRows == cute::size<0>(typename Tile::Cluster{}) * Tile::rows &&
                kSliceStage == Tile::depth);
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, typename Plain::Collective,
                                                      SliceEpilogue<typename Stages<P, kTile>::Epilogue_>, Slices>;
  const auto& [a, b, slices, accumulators, stride, stream, device, multiprocessors] = product;
  const int64_t rows = slice_rows(a.rows);
  const P program{.out = Matrix<float>(accumulators, rows * slices, b.rows, stride)};
  typename Kernel::Arguments arguments{
      .mode = cutlass::gemm::GemmUniversalMode::kGemm,
      .problem_shape = {static_cast<int>(a.rows), static_cast<int>(b.rows), static_cast<int>(a.depth), 1},
      .mainloop = Plain::main_arguments(a, b),
      .epilogue = {program, static_cast<int>(rows), slices}};
  arguments.scheduler.band = kBands[0];
  arguments.scheduler.slices = slices;
  return run<Kernel>(arguments, device, multiprocessors, stream, false);
}

__global__ void add(float* accumulators, int64_t slice, int64_t count, int slices) {
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4; i < count;
       i += int64_t{gridDim.x} * blockDim.x * 4) {
    float4 sum = *reinterpret_cast<const float4*>(accumulators + i);
    for (int s = 1; s < slices; ++s) {
      const float4 v = *reinterpret_cast<const float4*>(accumulators + s * slice + i);
      sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    }
    *reinterpret_cast<float4*>(accumulators + i) = sum;
  }
}

}  // namespace

int multiply_slices(Form form, const SlicedProduct& product) {
  switch (form) {
    case Form::TN:
      return launch<Form::TN>(product);
    case Form::NN:
      return launch<Form::NN>(product);
    case Form::NT:
      return launch<Form::NT>(product);
  }
  return cudaErrorInvalidValue;
}

int add_slices(const SlicedProduct& product) {
  constexpr int64_t kThreads = 256, kMostBlocks = 2048;
  const int64_t count = product.a.rows * product.stride;
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (count / 4 + kThreads - 1) / kThreads));
  add<<<blocks, kThreads, 0, product.stream>>>(product.accumulators, slice_rows(product.a.rows) * product.stride, count,
                                               product.slices);
  return cudaGetLastError();
}

}  // namespace coda::hopper
