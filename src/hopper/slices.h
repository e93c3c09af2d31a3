// Products whose depth is cut into slices that are multiplied beside each other: what the kernel does besides a plain product.
#pragma once
#include "coda/hopper/bands.h"

namespace coda::hopper {

/// Names SliceScheduler to CUTLASS's kernels.
struct Slices {};

/// All tiles of the first slice of the depth, in bands, then all of the second, and so on. A slice is a range of stages of the main loop;
/// no two differ by more than one.
class SliceScheduler : public BandScheduler {
 public:
  struct Arguments : BandScheduler::Arguments {
    int slices = 1;
  };
  struct Params : BandScheduler::Params {
    uint32_t slices, stages;  // of the depth
  };
  struct WorkTileInfo : BandScheduler::WorkTileInfo {
    uint32_t slice = 0, first = 0, count = 0;  // stages of the depth

    CUTLASS_HOST_DEVICE static WorkTileInfo invalid_work_tile() {
      return {BandScheduler::WorkTileInfo::invalid_work_tile()};
    }
    /// What the kernel hands to the epilogue.
    CUTLASS_HOST_DEVICE int32_t reduction_subtile_idx() const { return static_cast<int32_t>(slice); }
  };

  template <class Shape, class Tile, class Cluster, class Hardware>
  static Params to_underlying_arguments(Shape shape, Tile tile, Cluster cluster, const Hardware& hardware,
                                        const Arguments& arguments, void* = nullptr, uint32_t = 1, uint32_t = 1) {
    return {BandScheduler::to_underlying_arguments(shape, tile, cluster, hardware, arguments),
            static_cast<uint32_t>(arguments.slices),
            static_cast<uint32_t>(cute::ceil_div(cute::get<2>(shape), cute::size<2>(tile)))};
  }
  template <class Shape, class Tile, class Cluster, class Hardware>
  static dim3 get_grid_shape(const Params& params, Shape shape, Tile tile, Cluster cluster, Hardware hardware,
                             const Arguments& arguments, bool = true) {
    cute::get<3>(shape) = static_cast<int>(params.slices);
    return BandScheduler::get_grid_shape(params, shape, tile, cluster, hardware, arguments);
  }

  CUTLASS_DEVICE explicit SliceScheduler(const Params& params) : BandScheduler(params), params_(params) {}

  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
    return get_current_work();
  }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    const auto slice = static_cast<uint32_t>(index_ / params_.clusters);
    if (slice >= params_.slices) return WorkTileInfo::invalid_work_tile();
    const auto begin = [&](uint32_t s) { return static_cast<uint32_t>(uint64_t{params_.stages} * s / params_.slices); };
    return {tile(index_ - slice * params_.clusters), slice, begin(slice), begin(slice + 1) - begin(slice)};
  }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return index_ + step_ * count >= params_.clusters * params_.slices;
  }
  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline&&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Shape, class Tile>
  CUTLASS_HOST_DEVICE static int get_work_k_tile_count(const WorkTileInfo& work, Shape, Tile) {
    return static_cast<int>(work.count);
  }
  CUTLASS_HOST_DEVICE static uint32_t get_work_k_tile_start(const WorkTileInfo& work) { return work.first; }

 private:
  Params params_;
};

/// An epilogue whose outputs have a block of rows for each slice, one below the other.
template <class Epilogue>
class SliceEpilogue : public Epilogue {
 public:
  struct Arguments {
    typename Epilogue::Arguments program;
    int rows, slices;  // rows of a block: whole clusters of tiles
  };
  struct Params : Epilogue::Params {
    int rows, slices;
  };
  template <class Shape>
  static Params to_underlying_arguments(const Shape& shape, const Arguments& arguments, void* workspace) {
    return {Epilogue::to_underlying_arguments(cute::make_shape(arguments.rows * arguments.slices, cute::get<1>(shape)),
                                              arguments.program, workspace),
            arguments.rows, arguments.slices};
  }
  template <class Shape>
  static size_t get_workspace_size(const Shape&, const Arguments&) {
    return 0;
  }
  template <class Shape>
  static cutlass::Status initialize_workspace(const Shape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class Shape>
  static bool can_implement(const Shape&, const Arguments&) {
    return true;
  }

  template <class Shared>
  CUTLASS_HOST_DEVICE SliceEpilogue(const Params& params, Shared& shared) : Epilogue(params, shared), params_(params) {}

  template <class Load, class LoadState, class Store, class StoreState, class Shape, class TileShape, class Tile,
            class Accumulators, class Mma, class Shared>
  CUTLASS_DEVICE auto store(Load pipeline, LoadState state, Store store_pipeline, StoreState store_state, Shape shape,
                            TileShape tile_shape, Tile tile, Accumulators accumulators, Mma mma, int thread,
                            Shared& shared, int slice) {
    const int first = slice * (params_.rows / static_cast<int>(cute::size<0>(tile_shape)));
    return Epilogue::store(pipeline, state, store_pipeline, store_state,
                           cute::make_shape(params_.rows * params_.slices, cute::get<1>(shape)), tile_shape,
                           cute::make_coord(first + static_cast<int>(cute::get<0>(tile)), cute::get<1>(tile)),
                           accumulators, mma, thread, shared);
  }

 private:
  const Params& params_;
};

}  // namespace coda::hopper

template <class Arch, class Tile, class Cluster, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<coda::hopper::Slices, Arch, Tile, Cluster, kStages> {
  using Scheduler = coda::hopper::SliceScheduler;
};
