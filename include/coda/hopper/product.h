// Products of the Hopper engine: CUTLASS's main loops and kernels with a program's epilogue.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

// One of CUTLASS's headers leaves a warning of its own turned into an error.
#pragma GCC diagnostic push
#include <cutlass/cutlass.h>

#include <cutlass/gemm/collective/collective_mma.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#pragma GCC diagnostic pop

#include "coda/hopper/bands.h"
#include "coda/hopper/epilogue.h"
#include "coda/hopper/paced.h"

namespace coda::hopper {

using coda::detail::Form;
using coda::detail::HopperProduct;
using coda::detail::HopperTile;

/// Shared memory of a thread block on sm_90, and what of it the kernel keeps for barriers and its scheduler.
inline constexpr int kSharedBytes = 232448, kKernelBytes = 1024;

template <HopperTile kTile>
struct TileTraits;
template <int kRows, int kCols, int kGroups, bool kPingpong>
struct Traits {
  static constexpr int rows = kRows, cols = kCols, warp_groups = kGroups;  // groups that share a tile
  static constexpr bool pingpong = kPingpong;
  static constexpr int depth = 64;  // of a stage of the main loop
  static constexpr int stage_bytes = (kRows + kCols) * depth * 2;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<depth>>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Schedule = std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                      cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
};
template <>
struct TileTraits<HopperTile::pingpong_128x128> : Traits<128, 128, 1, true> {};
template <>
struct TileTraits<HopperTile::cooperative_128x128> : Traits<128, 128, 2, false> {};
template <>
struct TileTraits<HopperTile::pingpong_64x256> : Traits<64, 256, 1, true> {};
template <>
struct TileTraits<HopperTile::cooperative_128x256> : Traits<128, 256, 2, false> {};
template <>
struct TileTraits<HopperTile::cooperative_256x128> : Traits<256, 128, 2, false> {};

/// The stages of shared memory of a program's epilogue beside a tile's main loop. The main loop keeps as many as fit beside an
/// epilogue of the smallest size: one lost costs more than the epilogue gains (docs/measurements.md).
template <class P, HopperTile kTile>
struct Stages {
  using T = TileTraits<kTile>;
  static constexpr bool kPairs = coda::detail::takes_pair<P>;
  template <int kSubtile>
  using G = Geometry<T::rows, T::cols, T::warp_groups, kSubtile>;
  template <int kSubtile, int kLoad, int kStore>
  static constexpr int bytes = sizeof(typename Epilogue<P, G<kSubtile>, kLoad, kStore>::SharedStorage);
  static constexpr int main = kSharedBytes / T::stage_bytes - (kSharedBytes % T::stage_bytes < 20 * 1024 ? 1 : 0);
  static constexpr int budget = kSharedBytes - kKernelBytes - main * T::stage_bytes;
  static constexpr int local_width = [] {
    int width = 0;
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((width = coda::detail::field_info<P, I>::direction == Direction::local ? coda::detail::field_info<P, I>::extent
                                                                              : width),
       ...);
    }
    (std::make_integer_sequence<int, coda::detail::field_count<P>>{});
    return width;
  }();
  static constexpr int subtile = [] {
    if constexpr (local_width % 32 != 0)
      return 16;
    else
      return bytes<32, 2, 1> <= budget ? 32 : 16;
  }();
  static constexpr int store = bytes<subtile, 2, 2> <= budget ? 2 : 1;
  static constexpr int load = bytes<subtile, 2, store> <= budget ? 2 : 1;
  static constexpr bool fits = bytes<subtile, load, store> <= budget;
  using Epilogue_ = Epilogue<P, G<subtile>, load, store>;
};

/// Whether slots of so many columns, 0 for none, end where a tile of cols columns does.
constexpr bool slots_end_with_tile(int width, int cols) {
  return width == 0 || cols % width == 0;
}

/// Whether every reduction of P has its slots inside a tile.
template <class P, HopperTile kTile>
constexpr bool reductions_fit() {
  using T = TileTraits<kTile>;
  return []<int... I>(std::integer_sequence<int, I...>) {
    return (slots_end_with_tile(coda::detail::group_columns<P, I>(), T::cols) && ...) &&
           ((coda::detail::field_info<P, I>::kind != Kind::col_sum || coda::detail::field_info<P, I>::extent == 64) &&
            ...);
  }
  (std::make_integer_sequence<int, coda::detail::field_count<P>>{});
}

/// Lets Kernel have its shared memory on this device. Returns a cudaError_t. Asked of the driver once for each of 64 devices: it takes
/// half as long as a launch. (After cudaDeviceReset launches fail, as with all else that was made before.)
template <class Kernel>
cudaError_t allow_shared_memory(int device) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

/// Launches one of CUTLASS's kernels. Returns a cudaError_t.
template <class Kernel>
int run(typename Kernel::Arguments& arguments, int device, int multiprocessors, cudaStream_t stream, bool early) {
  arguments.hw_info.device_id = device;
  arguments.hw_info.sm_count = multiprocessors;
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  if (const cudaError_t error = allow_shared_memory<Kernel>(device)) return error;
  using Cluster = typename Kernel::ClusterShape;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), cute::size<2>(Cluster{})};
  // The producer warps wait for the kernel in front (CUTLASS_ENABLE_GDC_FOR_SM90); consumers read nothing before they have
  // something of the producers.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  return cudaLaunchKernelEx(&config, cutlass::device_kernel<Kernel>, params);
}

template <class P, Form kForm, HopperTile kTile, class S = Stages<P, kTile>>
struct Product {
  using T = TileTraits<kTile>;
  static constexpr bool kATransposed = kForm == Form::NT, kBTransposed = kForm != Form::TN;
  static constexpr auto kMajorA = kATransposed ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  static constexpr auto kMajorB = kBTransposed ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  // Inside CUTLASS an element is its own type of bf16; the bits are ours.
  using Element = cutlass::bfloat16_t;
  template <bool kTransposed>
  using Stride = std::conditional_t<kTransposed, cute::Stride<cute::_1, int64_t, int64_t>,
                                    cute::Stride<int64_t, cute::_1, int64_t>>;
  template <bool kTransposed>
  using Atom = std::conditional_t<kTransposed, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                  cute::GMMA::Layout_K_SW128_Atom<Element>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<T::rows / (T::pingpong ? 1 : 2)>, cute::Int<T::cols>, cute::Int<T::depth>>, kMajorA,
          kMajorB>(),
      cute::Layout<cute::Shape<cute::Int<T::warp_groups>, cute::_1, cute::_1>>{}));
  using Collective = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<S::main, typename T::Cluster, typename T::Schedule>,
      typename T::Shape, Element, Stride<kATransposed>, Element, Stride<kBTransposed>, Mma, cute::SM90_TMA_LOAD,
      Atom<kATransposed>, void, cute::identity, cute::SM90_TMA_LOAD_MULTICAST, Atom<kBTransposed>, void,
      cute::identity>;
  // A pingpong kernel's producer has no time to look around: half as much is in shared memory.
  using Main = std::conditional_t<T::pingpong, Collective, Paced<Collective>>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, typename S::Epilogue_, Bands>;
  static_assert(Kernel::SharedStorageSize <= kSharedBytes);

  template <bool kTransposed>
  static Stride<kTransposed> stride(const coda::detail::Factor& x) {
    if constexpr (kTransposed)
      return {cute::_1{}, row_distance<bf16>(x.depth, x.rows, x.stride), int64_t{0}};
    else
      return {row_distance<bf16>(x.rows, x.depth, x.stride), cute::_1{}, int64_t{0}};
  }
  static typename Main::Arguments main_arguments(const coda::detail::Factor& a, const coda::detail::Factor& b) {
    return {static_cast<const Element*>(a.data), stride<kATransposed>(a), static_cast<const Element*>(b.data),
            stride<kBTransposed>(b)};
  }
  static int launch(const HopperProduct& product) {
    const auto& [a, b, program, stream, device, multiprocessors, band, early] = product;
    typename Kernel::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(a.rows), static_cast<int>(b.rows), static_cast<int>(a.depth), 1},
        main_arguments(a, b),
        *static_cast<const P*>(program)};
    arguments.scheduler.band = band;
    return run<Kernel>(arguments, device, multiprocessors, stream, early);
  }
};

/// Forms, as bits of what CODA_HOPPER_PROGRAM asks for.
inline constexpr unsigned TN = 1, NN = 2, NT = 4, no_product = 0;

template <class P, Form kForm, HopperTile kTile>
constexpr bool is_possible() {
  if constexpr (!reductions_fit<P, kTile>())
    return false;
  else
    return Stages<P, kTile>::fits;
}

/// The kernels of P for one form: one for every tile that its reductions and its shared memory fit into.
template <class P, Form kForm, unsigned kForms, unsigned kBit, HopperTile... kTiles>
void add_kernels(std::vector<coda::detail::HopperKernel>& kernels) {
  if constexpr ((kForms & kBit) != 0) {
    const auto add = [&]<HopperTile kTile>() {
      if constexpr (is_possible<P, kForm, kTile>())
        kernels.push_back({kForm, kTile, &Product<P, kForm, kTile>::launch});
    };
    (add.template operator()<kTiles>(), ...);
  }
}
template <class P, unsigned kForms, HopperTile kTile>
void add_forms(std::vector<coda::detail::HopperKernel>& kernels) {
  add_kernels<P, Form::TN, kForms, TN, kTile>(kernels);
  add_kernels<P, Form::NN, kForms, NN, kTile>(kernels);
  add_kernels<P, Form::NT, kForms, NT, kTile>(kernels);
}
/// kForms with tiles of kTile, then kOtherForms with tiles of kOther.
template <class P, unsigned kForms, HopperTile kTile, unsigned kOtherForms, HopperTile kOther>
std::vector<coda::detail::HopperKernel> product_kernels() {
  static_assert(std::is_same_v<coda::detail::element_of<P>, bf16>, "the GPU engine's activations are bf16");
  std::vector<coda::detail::HopperKernel> kernels;
  add_forms<P, kForms, kTile>(kernels);
  add_forms<P, kOtherForms, kOther>(kernels);
  return kernels;
}

}  // namespace coda::hopper
