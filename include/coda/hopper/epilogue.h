// The collective epilogue that runs a program: what CUTLASS's sm90 TMA warp-specialised pingpong and cooperative kernels expect of
// theirs.
//
// A warp owns a strip of 16 rows of each slab: it waits for its inputs, runs the program, writes its strip of every output to shared
// memory and starts its own TMA stores, so that consumer warps never wait for each other.
#pragma once
#include <cutlass/pipeline/pipeline.hpp>

#include "coda/hopper/partial.h"
#include "coda/hopper/tile.h"
#include "coda/hopper/vector.h"

namespace coda::hopper {

template <class Info, class E, bool kPairs, class G>
struct PortFor {
  using type = PortOf<typename Info::Kind_, Info::direction, E, kPairs, G>;
};
template <class Info, class E, bool kPairs, class G>
requires std::is_void_v<typename Info::Kind_>
struct PortFor<Info, E, kPairs, G> {
  using type = NumberPort<typename Info::Element>;
};

template <class P, class G, int kLoadStages, int kStoreStages, class Numbers>
class EpilogueOf;

/// Of program P with tiles of G, and this many stages of shared memory for what it loads and stores.
template <class P, class G, int kLoadStages, int kStoreStages>
using Epilogue =
    EpilogueOf<P, G, kLoadStages, kStoreStages, std::make_integer_sequence<int, coda::detail::field_count<P>>>;

template <class P, class G, int kLoadStages, int kStoreStages, int... I>
class EpilogueOf<P, G, kLoadStages, kStoreStages, std::integer_sequence<int, I...>> {
  static constexpr bool kPairs = coda::detail::takes_pair<P>;
  static constexpr int kFields = sizeof...(I);
  using E = coda::detail::element_of<P>;
  using V = coda::detail::accumulator_t<P, float>;
  template <int N>
  using Info = coda::detail::field_info<P, N>;
  template <int N>
  using Port_ = typename PortFor<Info<N>, E, kPairs, G>::type;
  template <int N>
  static constexpr bool is_out = Info<N>::direction == Direction::out;
  template <int N>
  static constexpr bool is_local = Info<N>::direction == Direction::local;
  static constexpr int kPasses = coda::detail::measure_passes<P, V>();

  /// Subtiles that measure() sees together, all of a slab's without it.
  static constexpr int group_subtiles() {
    int width = G::cols;
    ((width = is_local<I> ? Info<I>::extent : width), ...);
    return width / G::subtile;
  }
  static constexpr int kGroup = group_subtiles(), kGroups = G::subtiles / kGroup;
  static_assert(kGroup >= 1 && kGroup * kGroups == G::subtiles);

  template <int N>
  static constexpr int load_offset() {
    int offset = 0;
    ((offset += I < N ? Port_<I>::load_bytes : 0), ...);
    return offset;
  }
  template <int N>
  static constexpr int store_offset() {
    int offset = 0;
    ((offset += I < N ? Port_<I>::store_bytes : 0), ...);
    return offset;
  }
  template <int N>
  static constexpr int scratch_offset() {
    int offset = 0;
    ((offset += I < N ? Port_<I>::scratch_bytes : 0), ...);
    return offset;
  }
  static constexpr int kLoadBytes = (Port_<I>::load_bytes + ... + 0), kStoreBytes = (Port_<I>::store_bytes + ... + 0);
  static constexpr int kScratchBytes = (Port_<I>::scratch_bytes + ... + 0);
  static constexpr bool kLoads = kLoadBytes > 0, kStores = kStoreBytes > 0;
  /// Tiles are loaded again for every pass: which of them measure() reads is not known.
  static constexpr int kLoadPasses = kPasses + 1;
  static constexpr int kLoadsOfTile = G::slabs * G::subtiles * kLoadPasses;

 public:
  // What the kernel layer and the adapter name.
  struct DispatchPolicy {};
  struct ThreadEpilogueOp {};
  using ElementC = bf16;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using ElementD = bf16;
  using StrideD = StrideC;
  using GmemTiledCopyC = cute::SM90_TMA_LOAD;
  using GmemTiledCopyD = cute::SM90_TMA_STORE;
  using LoadPipeline = cutlass::PipelineTransactionAsync<kLoadStages>;
  using LoadPipelineState = cutlass::PipelineState<kLoadStages>;
  using StorePipeline = cutlass::PipelineTmaStore<1>;  // each warp keeps its own bulk groups instead
  using StorePipelineState = cutlass::PipelineState<1>;
  static constexpr bool RequiresTransactionBytes = true;
  struct SharedStorage {
    struct TensorStorage {
      alignas(1024) char load[kLoads ? kLoadStages * kLoadBytes : 16];
      alignas(1024) char store[kStores ? kStoreStages * kStoreBytes : 16];
      alignas(16) char scratch[kScratchBytes > 0 ? G::warp_groups* kScratchBytes : 16];
    } tensors;
    using PipelineStorage = typename LoadPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;
  using Arguments = P;
  struct Params {
    Members<std::integer_sequence<int, I...>, typename Port_<I>::Params...> fields;
    uint32_t tma_transaction_bytes;
  };

  template <class Shape>
  static Params to_underlying_arguments(const Shape& shape, const P& program, void*) {
    const int m = cute::get<0>(shape), n = cute::get<1>(shape);
    return coda::detail::with_fields<kFields>(program, [&](const auto&... field) {
      return Params{{{Port_<I>::make(field, m, n)}...}, kLoadBytes};
    });
  }
  template <class Shape>
  static size_t get_workspace_size(const Shape&, const P&) {
    return 0;
  }
  template <class Shape>
  static cutlass::Status initialize_workspace(const Shape&, const P&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class Shape>
  static bool can_implement(const Shape&, const P&) {
    return true;
  }
  template <class TileShape>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(TileShape) {
    return kLoadsOfTile;
  }
  template <class TileShape>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(TileShape) {
    return G::slabs * G::subtiles;
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    (Port_<I>::prefetch_descriptor(member<I>(params.fields)), ...);
  }
  CUTLASS_HOST_DEVICE EpilogueOf(const Params& params, TensorStorage&) : params_(params) {}
  CUTLASS_DEVICE bool is_producer_load_needed() const { return kLoads; }

  // ---- the producer warp

  template <class Shape, class TileShape, class Tile, class Mma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Shape, TileShape, Tile tile, Mma, int,
                           TensorStorage& shared, int = -1) {
    if constexpr (kLoads) {
      const int row0 = int(cute::get<0>(tile)) * G::rows, col0 = int(cute::get<1>(tile)) * G::cols;
      const bool leader = cute::elect_one_sync();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kLoadsOfTile; ++i) {
        constexpr int kOfGroup = kGroup * kLoadPasses;
        const int slab = i / (G::subtiles * kLoadPasses), in_slab = i % (G::subtiles * kLoadPasses);
        const int s = in_slab / kOfGroup * kGroup + in_slab % kGroup;
        pipeline.producer_acquire(state);
        if (leader) {
          uint64_t* barrier = pipeline.producer_get_barrier(state);
          pipeline.producer_expect_transaction(state);
          (Port_<I>::issue_load(member<I>(params_.fields), barrier,
                                shared.load + state.index() * kLoadBytes + load_offset<I>(), row0 + slab * G::slab_rows,
                                col0 + s * G::subtile),
           ...);
        }
        pipeline.producer_commit(state);
        ++state;
      }
    }
    return state;
  }
  CUTLASS_DEVICE auto load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
    return state;
  }

  // ---- the consumer warps

  template <class Shape, class TileShape, class Tile, class Engine, class Layout, class Mma>
  CUTLASS_DEVICE auto store(LoadPipeline pipeline, LoadPipelineState state, StorePipeline,
                            StorePipelineState store_state, Shape shape, TileShape, Tile tile,
                            cute::Tensor<Engine, Layout> acc, Mma, int thread, TensorStorage& shared, int = -1) {
    static_assert(decltype(cute::size(acc))::value == G::slabs * G::cols / 2);
    Place place;
    place.row0 = int(cute::get<0>(tile)) * G::rows;
    place.col0 = int(cute::get<1>(tile)) * G::cols;
    place.m = int(cute::get<0>(shape));
    place.n = int(cute::get<1>(shape));
    place.lane = thread & 31;
    place.q = place.lane & 3;
    place.r = place.lane >> 2;
    place.strip = thread >> 5;
    // Only the last tiles of a row or column pay for the masks.
    if (place.row0 + G::rows <= place.m && place.col0 + G::cols <= place.n)
      run_tile<true>(pipeline, state, place, acc, shared);
    else
      run_tile<false>(pipeline, state, place, acc, shared);
    return cute::make_tuple(state, store_state);
  }
  CUTLASS_DEVICE auto store_tail(LoadPipeline, LoadPipelineState load_state, StorePipeline,
                                 StorePipelineState store_state) {
    if constexpr (kStores) cute::tma_store_wait<0>();
    return cute::make_tuple(load_state, store_state);
  }

 private:
  using Ports = Members<std::integer_sequence<int, I...>, Port_<I>...>;
  template <int N>
  CUTLASS_DEVICE static auto& port(Ports& ports) {
    return member<N>(ports);
  }
  template <int N>
  CUTLASS_DEVICE const auto& field_params() const {
    return member<N>(params_.fields);
  }

  template <bool kWhole, class Acc>
  CUTLASS_DEVICE void run_tile(LoadPipeline& pipeline, LoadPipelineState& state, const Place& place, Acc& acc,
                               TensorStorage& shared) {
    Ports ports;
    (port<I>(ports).begin_tile(field_params<I>(), place), ...);
    char* scratch = shared.scratch + place.strip / 4 * kScratchBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < G::slabs; ++slab) {
      (port<I>(ports).begin_slab(field_params<I>(), place, slab), ...);
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (kPasses > 0) measure_passes<0, kWhole>(pipeline, state, place, acc, ports, shared, slab, group);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          const int s = group * kGroup + i;
          const bool last = s == G::subtiles - 1;
          apply<kWhole>(pipeline, state, place, acc, ports, shared, scratch, slab, s,
                        last && slab == G::slabs - 1 ? -1 : (s + 1) % G::subtiles);
        }
      }
      (port<I>(ports).end_slab(field_params<I>(), place, slab, scratch + scratch_offset<I>()), ...);
    }
  }

  /// Pass kPass of measure() over a group, and those after it.
  template <int kPass, bool kWhole, class Acc>
  CUTLASS_DEVICE void measure_passes(LoadPipeline& pipeline, LoadPipelineState& state, const Place& place, Acc& acc,
                                     Ports& ports, TensorStorage& shared, int slab, int group) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const int s = group * kGroup + i;
      (port<I>(ports).begin_subtile(field_params<I>(), place, s, group * kGroup + (i + 1) % kGroup), ...);
      const uint32_t in = wait_for_inputs(pipeline, state, shared);
      CUTLASS_PRAGMA_UNROLL
      for (int u = 0; u < G::units; ++u) {
        fetch(ports, in, u);
        if (u == G::units - 1) release_inputs(pipeline, state);
        if (!unit_exists<kWhole>(place, s, u)) continue;
        for_values<kWhole>(place, slab, s, u, [&](int h, int x, bool, bool valid_col, const auto&) {
          using Side = Measuring<V, E, kPass>;
          coda::detail::on_side<P, Side> program{initial<I, Side>(ports, h, x, u)...};
          V value = accumulator(acc, slab, s, u, h, x);
          if constexpr (coda::detail::has_single_measure<P, V>)
            program.measure(value);
          else
            program.measure(Pass<kPass>{}, value);
          set_accumulator(acc, slab, s, u, h, x, value);
          (gather<I, kPass>(ports, h, valid_col, coda::detail::field<kFields, I>(program)), ...);
        });
      }
    }
    (end_group<I, kPass>(ports), ...);
    if constexpr (kPass + 1 < kPasses)
      measure_passes<kPass + 1, kWhole>(pipeline, state, place, acc, ports, shared, slab, group);
  }
  template <int N, int kPass, class F>
  CUTLASS_DEVICE static void gather(Ports& ports, int h, bool valid_col, const F& value) {
    if constexpr (is_local<N> && Info<N>::pass == kPass) port<N>(ports).gather(h, valid_col, value);
  }
  template <int N, int kPass>
  CUTLASS_DEVICE static void end_group(Ports& ports) {
    if constexpr (is_local<N> && Info<N>::pass == kPass) port<N>(ports).end_group();
  }

  /// The program over a subtile.
  template <bool kWhole, class Acc>
  CUTLASS_DEVICE void apply(LoadPipeline& pipeline, LoadPipelineState& state, const Place& place, Acc& acc,
                            Ports& ports, TensorStorage& shared, char* scratch, int slab, int s, int following) {
    (port<I>(ports).begin_subtile(field_params<I>(), place, s, following), ...);
    const int stage = (slab * G::subtiles + s) % kStoreStages;
    const uint32_t in = wait_for_inputs(pipeline, state, shared);
    const uint32_t out = cute::cast_smem_ptr_to_uint(shared.store) + stage * kStoreBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < G::units; ++u) {
      fetch(ports, in, u);
      if (u == G::units - 1) release_inputs(pipeline, state);
      if (unit_exists<kWhole>(place, s, u))
        for_values<kWhole>(
            place, slab, s, u, [&](int h, int x, bool valid_row, bool valid_col, const At<Registers<V, E>>& at) {
              using Side = Registers<V, E>;
              coda::detail::on_side<P, Side> program{initial<I, Side>(ports, h, x, u)...};
              const V value = accumulator(acc, slab, s, u, h, x);
              if constexpr (coda::detail::takes_at<P>)
                program(value, at);
              else
                program(value);
              (put<I>(ports, h, x, u, valid_row, valid_col, coda::detail::field<kFields, I>(program)), ...);
            });
      if constexpr (kStores) {
        if (u == 0) {  // what was stored from this stage before has been read
          if (place.lane == 0) cute::tma_store_wait<kStoreStages - 1>();
          __syncwarp();
        }
      }
      (finish<I>(ports, out, u), ...);
      (port<I>(ports).end_unit(field_params<I>(), place, slab, s * G::units + u, scratch + scratch_offset<I>()), ...);
    }
    if constexpr (kStores) {
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (place.lane == 0) {
        (Port_<I>::issue_store(field_params<I>(), place, shared.store + stage * kStoreBytes + store_offset<I>(), slab,
                               s),
         ...);
        cute::tma_store_arrive();
      }
    }
  }
  template <int N, class F>
  CUTLASS_DEVICE static void put(Ports& ports, int h, int x, int u, bool valid_row, bool valid_col, const F& value) {
    if constexpr (is_out<N>) port<N>(ports).put(h, x, u, valid_row, valid_col, value);
  }
  template <int N>
  CUTLASS_DEVICE static void finish(Ports& ports, uint32_t out, int u) {
    if constexpr (Port_<N>::store_bytes > 0) port<N>(ports).finish(out + store_offset<N>(), u);
  }

  CUTLASS_DEVICE static uint32_t wait_for_inputs(LoadPipeline& pipeline, const LoadPipelineState& state,
                                                 TensorStorage& shared) {
    if constexpr (kLoads) pipeline.consumer_wait(state);
    return cute::cast_smem_ptr_to_uint(shared.load) + state.index() * kLoadBytes;
  }
  CUTLASS_DEVICE static void release_inputs(LoadPipeline& pipeline, LoadPipelineState& state) {
    if constexpr (kLoads) {
      cutlass::arch::fence_view_async_shared();
      pipeline.consumer_release(state);
      ++state;
    }
  }
  CUTLASS_DEVICE static void fetch(Ports& ports, uint32_t in, int u) { (fetch_one<I>(ports, in, u), ...); }
  template <int N>
  CUTLASS_DEVICE static void fetch_one(Ports& ports, uint32_t in, int u) {
    if constexpr (Port_<N>::load_bytes > 0) port<N>(ports).fetch(in + load_offset<N>(), u);
  }

  /// The value that field N holds before the program runs on side S.
  template <int N, class S>
  CUTLASS_DEVICE static auto initial(Ports& ports, int h, int x, int u) {
    using FieldType =
        std::remove_cvref_t<decltype(coda::detail::field<kFields, N>(std::declval<coda::detail::on_side<P, S>&>()))>;
    if constexpr (requires { FieldType(port<N>(ports).get(h, x, u)); })
      return FieldType(port<N>(ports).get(h, x, u));
    else
      return FieldType{};
  }

  /// Whether any column of a unit does. Asked of every unit at the edge: units that the compiler sees together take more registers
  /// than there are.
  template <bool kWhole>
  CUTLASS_DEVICE static bool unit_exists(const Place& place, int s, int u) {
    return kWhole || place.col0 + s * G::subtile + u * 16 < place.n;
  }
  /// body(h, x, valid row, valid column, at) for every value of this thread in a unit.
  template <bool kWhole, class Body>
  CUTLASS_DEVICE static void for_values(const Place& place, int slab, int s, int u, Body&& body) {
    const int col = place.col0 + s * G::subtile + u * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < (kPairs ? 2 : 4); ++x) {
        At<Registers<V, E>> at;
        at.row = place.row<G>(slab, h);
        at.col = col + 8 * (x >> 1) + 2 * place.q + (x & 1);
        body(h, x, kWhole || at.row < place.m, kWhole || at.col < place.n, at);
      }
    }
  }
  /// Of this thread: element (h, e) of block b of a unit.
  template <class Acc>
  CUTLASS_DEVICE static auto& element(Acc& acc, int slab, int s, int u, int h, int b, int e) {
    return acc(e + 2 * h + 4 * ((s * G::units + u) * 2 + b) + slab * (G::cols / 2));
  }
  template <class Acc>
  CUTLASS_DEVICE static V accumulator(Acc& acc, int slab, int s, int u, int h, int x) {
    if constexpr (kPairs)
      return {element(acc, slab, s, u, h, 0, x), element(acc, slab, s, u, h, 1, x)};
    else
      return element(acc, slab, s, u, h, x >> 1, x & 1);
  }
  template <class Acc>
  CUTLASS_DEVICE static void set_accumulator(Acc& acc, int slab, int s, int u, int h, int x, V value) {
    if constexpr (kPairs) {
      element(acc, slab, s, u, h, 0, x) = value.first;
      element(acc, slab, s, u, h, 1, x) = value.second;
    } else {
      element(acc, slab, s, u, h, x >> 1, x & 1) = value;
    }
  }

  const Params& params_;
};

}  // namespace coda::hopper
