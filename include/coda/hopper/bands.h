// The order in which thread blocks take tiles.
#pragma once
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

namespace coda::hopper {

/// Names BandScheduler to CUTLASS's kernels.
struct Bands {};

/// Clusters of tiles are taken in bands, so many rows of clusters high (the last one as high as is left), a band column by column. What is
/// in flight at a time is then nearly a square, and reads least of a and b (docs/measurements.md). CUTLASS's own order can do so too,
/// but rounds rows and columns of clusters up to multiples of the band, and multiplies tiles of nothing for them.
class BandScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  using Hardware = cutlass::KernelHardwareInfo;
  /// In Base's own order, which is only asked for the grid.
  static Base::Arguments plain() { return {1, RasterOrderOptions::AlongN}; }

 public:
  struct Arguments {
    int band = 1;
    // What the kernel layer writes as it asks for the grid.
    int max_swizzle_size = 1;
    RasterOrderOptions raster_order = RasterOrderOptions::AlongN;
  };
  struct Params : Base::Params {
    uint64_t clusters;
    uint32_t rows, band;  // of clusters
    cutlass::FastDivmodU64 band_clusters;
  };

  template <class Shape, class Tile, class Cluster>
  static Params to_underlying_arguments(Shape shape, Tile tile, Cluster cluster, const Hardware& hardware,
                                        const Arguments& arguments, void* = nullptr, uint32_t = 1, uint32_t = 1) {
    const dim3 blocks = Base::get_tiled_cta_shape_mnl(shape, tile, cluster);
    const uint32_t rows = blocks.x / cute::size<0>(cluster), cols = blocks.y / cute::size<1>(cluster);
    const uint32_t band = arguments.band;
    return {Base::to_underlying_arguments(shape, tile, cluster, hardware, plain()), uint64_t{rows} * cols, rows, band,
            cutlass::FastDivmodU64(uint64_t{band} * cols)};
  }
  template <class Shape, class Tile, class Cluster>
  static dim3 get_grid_shape(const Params& params, Shape shape, Tile tile, Cluster cluster, Hardware hardware,
                             const Arguments&, bool = true) {
    return Base::get_grid_shape(params, shape, tile, cluster, hardware, plain());
  }
  static bool can_implement(const Arguments& arguments) { return arguments.band >= 1; }
  template <class Shape, class Accumulator>
  static size_t get_workspace_size(const Arguments&, Shape, const Hardware&, uint32_t, uint32_t = 1, uint32_t = 1) {
    return 0;
  }
  template <class Shape, class Accumulator>
  static cutlass::Status initialize_workspace(const Arguments&, void*, cudaStream_t, Shape, const Hardware&, uint32_t,
                                              uint32_t = 1, uint32_t = 1, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_DEVICE explicit BandScheduler(const Params& params)
      : index_((uint64_t{blockIdx.x} + uint64_t{blockIdx.y} * gridDim.x) / params.cluster_shape_m_),
        step_(uint64_t{gridDim.x} * gridDim.y / params.cluster_shape_m_),
        params_(params) {}

  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) {
    return get_current_work();
  }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile(index_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { index_ += step_ * count; }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return index_ + step_ * count >= params_.clusters;
  }
  /// Of a pipeline that other schedulers have there is nothing here.
  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline&&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

 protected:
  /// This block's tile of a cluster, which is one tile wide.
  CUTLASS_DEVICE WorkTileInfo tile(uint64_t cluster) const {
    if (cluster >= params_.clusters) return WorkTileInfo::invalid_work_tile();
    uint64_t band, rest;
    params_.band_clusters(band, rest, cluster);
    const uint32_t first_row = static_cast<uint32_t>(band) * params_.band;
    const uint32_t height = cute::min(params_.band, params_.rows - first_row);
    const uint32_t in_band = static_cast<uint32_t>(rest), col = in_band / height, row = first_row + in_band % height;
    return {static_cast<int32_t>(row * params_.cluster_shape_m_ + cute::block_id_in_cluster().x),
            static_cast<int32_t>(col), 0, true};
  }

  uint64_t index_, step_;  // of clusters

 private:
  Params params_;
};

}  // namespace coda::hopper

template <class Arch, class Tile, class Cluster, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<coda::hopper::Bands, Arch, Tile, Cluster, kStages> {
  using Scheduler = coda::hopper::BandScheduler;
};
