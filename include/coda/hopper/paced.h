// Clusters of thread blocks that stay near each other in the depth of a product, so that what one reads the others find in the cache.
#pragma once
#include <cstdint>

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>

namespace coda::hopper {

inline constexpr uint32_t kPacedClusters = 128;
/// How far each cluster in flight has come: steps of the depth that it has begun, 0 before its first and after its last. Nothing but pace
/// depends on it, so kernels that run at the same time may share it.
static __device__ uint32_t steps_begun[kPacedClusters];

/// Main, one of CUTLASS's collectives of TMA loads and wgmma, with a producer that waits for clusters that are behind.
///
/// All clusters in flight read the same rows of a and columns of b, each some of the others', and nothing keeps them together: after a few
/// tiles of a large depth they are so far apart that the second-level cache has lost what one of them has read when another comes to
/// it, and it is read from memory up to four times (docs/measurements.md). A cluster that is kLead steps ahead of the last one waits here, for
/// a limited time: clusters that have not begun, since something else has their multiprocessors, are not waited for.
template <class Main>
class Paced : public Main {
 public:
  using Arguments = typename Main::Arguments;
  struct Params : Main::Params {
    int step;  // stages of the pipeline
  };
  template <class Shape>
  static Params to_underlying_arguments(const Shape& shape, const Arguments& arguments, void* workspace) {
    // Smaller depths stay together by themselves.
    const int64_t depth = cute::get<2>(shape);
    return {Main::to_underlying_arguments(shape, arguments, workspace), depth >= kLeastDepth ? kStep : kWhole};
  }

  template <class Inputs, class Block, class Iterator>
  CUTLASS_DEVICE void load(const Params& params, typename Main::MainloopPipeline pipeline,
                           typename Main::PipelineState state, const Inputs& inputs, const Block& block,
                           const Iterator& first, int count, int lane, uint32_t rank,
                           typename Main::TensorStorage& storage) {
    // The other block of a cluster is held by what the two load for each other.
    const bool paced = params.step == kStep && rank == 0;
    Stage stage{static_cast<int>(*first)};
    CUTLASS_PRAGMA_NO_UNROLL
    for (;;) {
      const int now = count < params.step ? count : params.step;
      if (paced) wait_for_the_last(lane);
      // As if it were another each time: what depends on it is computed again, and not kept in one of a producer's 40 registers.
      uint32_t fresh = rank;
      asm volatile("" : "+r"(fresh));
      Main::load(params, pipeline, state, inputs, block, stage, now, lane, fresh, storage);
      count -= now;
      if (count == 0) return;
      state.advance(now);
      stage.at += now;
    }
  }
  CUTLASS_DEVICE void load_tail(typename Main::MainloopPipeline pipeline, typename Main::PipelineState state) {
    publish(0);
    Main::load_tail(pipeline, state);
  }

 private:
  static constexpr int kStep = 16, kWhole = 1 << 30, kPatience = 32;  // a look at the others takes about a microsecond
  static constexpr uint32_t kLead = 2, kAlone = 1u << 30, kNone = 0xffffffffu;
  static constexpr int64_t kLeastDepth = 4096;

  /// Where load is in the depth.
  struct Stage {
    int at;
    CUTLASS_DEVICE int operator*() const { return at; }
    CUTLASS_DEVICE Stage& operator++() {
      ++at;
      return *this;
    }
  };

  CUTLASS_DEVICE static void publish(uint32_t steps) {
    const dim3 at = cute::cluster_id_in_grid(), grid = cute::cluster_grid_dims();
    const uint32_t cluster = at.x + at.y * grid.x;
    if (cluster < kPacedClusters && threadIdx.x % 32 == 0 && cute::block_rank_in_cluster() == 0)
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(&steps_begun[cluster]), "r"(steps) : "memory");
  }
  /// One less than the steps that the last one of a lane's clusters has begun; kNone if none of them is under way.
  CUTLASS_DEVICE static uint32_t last_of(int lane) {
    const dim3 grid = cute::cluster_grid_dims();
    const uint32_t in_flight = grid.x * grid.y;
    const uint32_t clusters = in_flight < kPacedClusters ? in_flight : kPacedClusters;
    uint32_t last = kNone;
    for (uint32_t i = lane; i < clusters; i += 32) {
      uint32_t steps;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(steps) : "l"(&steps_begun[i]) : "memory");
      last = last < steps - 1 ? last : steps - 1;
    }
    return last;
  }
  /// Of a whole warp. Who has waited in vain does not wait again, nor is it waited for.
  CUTLASS_DEVICE void wait_for_the_last(int lane) {
    publish(++begun_);
    if (begun_ > kAlone) return;
    for (int looks = 0; looks < kPatience; ++looks) {
      const uint32_t last = __reduce_min_sync(0xffffffffu, last_of(lane));
      if (last == kNone || last + 1 + kLead >= begun_) return;
    }
    begun_ = kAlone;
  }

  uint32_t begun_ = 0;
};

}  // namespace coda::hopper
