// Operands that are matrices: through shared memory by TMA, a subtile at a time, to and from registers by ldmatrix and stmatrix.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "coda/hopper/geometry.h"
#include "coda/hopper/warp.h"

namespace coda::hopper {

/// Elements from a row to the next; of a single row one that TMA takes, since there is none.
template <class T>
constexpr int64_t row_distance(int64_t rows, int64_t cols, int64_t stride) {
  constexpr int64_t kStep = 16 / sizeof(T);
  return rows > 1 ? stride : (cols + kStep - 1) / kStep * kStep;
}

/// The driver's cuTensorMapEncodeTiled, looked up once. Throws DeviceError where the driver has none.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
      throw DeviceError("the driver has no cuTensorMapEncodeTiled, which CUDA 12.0 and later have");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

/// A descriptor of rows × cols elements, row-major, in boxes of box_rows × box_cols that are swizzled over their 32, 64 or 128 bytes
/// of a row.
template <class T>
cute::TmaDescriptor make_descriptor(const T* data, int64_t rows, int64_t cols, int64_t stride, int box_rows,
                                    int box_cols) {
  cute::TmaDescriptor descriptor{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * sizeof(T)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const int bytes = box_cols * static_cast<int>(sizeof(T));
  const auto swizzle = bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto type = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const CUresult result = tensor_map_encoder()(
      reinterpret_cast<CUtensorMap*>(&descriptor), type, 2, const_cast<T*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError("cuTensorMapEncodeTiled failed with error " + std::to_string(static_cast<int>(result)));
  return descriptor;
}

CUTLASS_DEVICE float low_of(uint32_t packed) {
  return __uint_as_float(packed << 16);
}
CUTLASS_DEVICE float high_of(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

// clang-format off
CUTLASS_DEVICE void load_matrix(uint32_t address, uint32_t (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
CUTLASS_DEVICE void load_matrix(uint32_t address, uint32_t (&v)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");
}
CUTLASS_DEVICE void store_matrix(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
CUTLASS_DEVICE void store_matrix(uint32_t address, const uint32_t (&v)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" :: "r"(address), "r"(v[0]), "r"(v[1]) : "memory");
}
CUTLASS_DEVICE void load_two(uint32_t address, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address) : "memory");
}
CUTLASS_DEVICE void store_two(uint32_t address, const float (&v)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" :: "r"(address), "f"(v[0]), "f"(v[1]) : "memory");
}
// clang-format on

/// A matrix with kNumerator / kDenominator columns for each of the accumulators'. A store adds to what is there if kAdd.
template <Direction kDirection, class T, int kNumerator, int kDenominator, bool kPairs, class G, bool kAdd = false>
struct TileMatrix : Port {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, float>, "a tile's elements are bf16 or float");
  static constexpr bool kIn = kDirection == Direction::in, kWide = sizeof(T) == 4;
  static constexpr int kCols = G::subtile * kNumerator / kDenominator;  // of a subtile
  static constexpr int kRowBytes = kCols * static_cast<int>(sizeof(T));
  static constexpr int kBoxBytes = kRowBytes < 128 ? kRowBytes : 128;  // of a row of a box
  static constexpr int kBoxCols = kBoxBytes / static_cast<int>(sizeof(T)), kBoxes = kRowBytes / kBoxBytes;
  static constexpr int kBoxSize = G::slab_rows * kBoxBytes;
  static_assert(kBoxBytes == 32 || kBoxBytes == 64 || kBoxBytes == 128);
  static constexpr int kBlocks = 2 * kNumerator / kDenominator;  // of 8 columns, of a unit
  static constexpr int load_bytes = kIn ? kBoxes * kBoxSize : 0, store_bytes = kIn ? 0 : kBoxes * kBoxSize;
  static constexpr int kStoreRows = 16;  // a warp's

  struct Params {
    cute::TmaDescriptor descriptor;
  };
  template <class View>
  static Params make(const View& x, int m, int n) {
    return {make_descriptor<T>(x.data, m, int64_t{n} * kNumerator / kDenominator, row_distance<T>(m, x.cols, x.stride),
                               kIn ? G::slab_rows : kStoreRows, kBoxCols)};
  }
  CUTLASS_DEVICE static void prefetch_descriptor(const Params& p) { cute::prefetch_tma_descriptor(&p.descriptor); }
  CUTLASS_DEVICE static void issue_load(const Params& p, uint64_t* barrier, char* shared, int row, int col) {
    if constexpr (kIn) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBoxes; ++i)
        cute::SM90_TMA_LOAD_2D::copy(&p.descriptor, barrier,
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     shared + i * kBoxSize, col * kNumerator / kDenominator + i * kBoxCols, row);
    }
  }
  CUTLASS_DEVICE static void issue_store(const Params& p, const Place& place, char* shared, int slab, int s) {
    if constexpr (!kIn) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBoxes; ++i) {
        const char* from = shared + i * kBoxSize + place.strip * 16 * kBoxBytes;
        const int col = (place.col0 + s * G::subtile) * kNumerator / kDenominator + i * kBoxCols;
        const int row = place.row0 + slab * G::slab_rows + place.strip * 16;
        if constexpr (kAdd)
          cute::SM90_TMA_REDUCE_ADD_2D::copy(&p.descriptor, from, col, row);
        else
          cute::SM90_TMA_STORE_2D::copy(&p.descriptor, from, col, row);
      }
    }
  }

  float v[kBlocks][2][2];  // [block][h][e]
  // What of the swizzled address does not depend on the unit.
  uint32_t row_part, flip;

  CUTLASS_DEVICE void begin_tile(const Params&, const Place& place) {
    // ldmatrix and stmatrix take the address of row lane % 16 of block lane / 16; a wide element is its own thread's.
    const int row = place.strip * 16 + (kWide ? place.r : place.lane & 15);  // 8 rows further the swizzle is the same
    const int chunk = kWide ? place.q >> 1 : kBlocks >= 2 ? place.lane >> 4 : 0;
    row_part = row * kBoxBytes + (kWide ? (place.q & 1) * 8 : 0);
    flip = (((row * kBoxBytes >> 7) & (kBoxBytes / 16 - 1)) ^ chunk) << 4;
  }
  /// Of 8-column block number `block` of the subtile.
  CUTLASS_DEVICE uint32_t address(uint32_t base, int block) const {
    const int offset = block * 8 * static_cast<int>(sizeof(T));
    return base + offset / kBoxBytes * kBoxSize + row_part + (offset % kBoxBytes ^ flip);
  }
  CUTLASS_DEVICE void fetch(uint32_t base, int u) {
    if constexpr (kIn && kWide) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kBlocks; ++i)
        load_two(address(base, u * kBlocks + i / 2) + i % 2 * 8 * kBoxBytes, v[i / 2][i % 2]);
    } else if constexpr (kIn) {
      constexpr int kAtOnce = kBlocks < 2 ? 1 : 2;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBlocks; b += kAtOnce) {
        uint32_t words[2 * kAtOnce];
        load_matrix(address(base, u * kBlocks + b), words);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          v[b + i / 2][i % 2][0] = low_of(words[i]);
          v[b + i / 2][i % 2][1] = high_of(words[i]);
        }
      }
    }
  }
  CUTLASS_DEVICE void finish(uint32_t base, int u) {
    if constexpr (!kIn && kWide) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kBlocks; ++i)
        store_two(address(base, u * kBlocks + i / 2) + i % 2 * 8 * kBoxBytes, v[i / 2][i % 2]);
    } else if constexpr (!kIn) {
      constexpr int kAtOnce = kBlocks < 2 ? 1 : 2;
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < kBlocks; b += kAtOnce) {
        uint32_t words[2 * kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kAtOnce; ++i) words[i] = pack_bf16(v[b + i / 2][i % 2][0], v[b + i / 2][i % 2][1]);
        store_matrix(address(base, u * kBlocks + b), words);
      }
    }
  }

  // Value x of row h of a unit: of single values column x % 2 of block x / 2, of pairs columns x of both blocks.
  CUTLASS_DEVICE auto get(int h, int x, int) const {
    if constexpr (kDenominator == 2)
      return v[0][h][x];
    else if constexpr (kNumerator == 2)
      return Pair<float>{v[2 * (x >> 1)][h][x & 1], v[2 * (x >> 1) + 1][h][x & 1]};
    else if constexpr (kPairs)
      return Pair<float>{v[0][h][x], v[1][h][x]};
    else
      return v[x >> 1][h][x & 1];
  }
  template <class V>
  CUTLASS_DEVICE void put(int h, int x, int, bool, bool, const V& value) {
    if constexpr (kDenominator == 2) {
      v[0][h][x] = value;
    } else if constexpr (kNumerator == 2) {
      v[2 * (x >> 1)][h][x & 1] = value.first;
      v[2 * (x >> 1) + 1][h][x & 1] = value.second;
    } else if constexpr (kPairs) {
      v[0][h][x] = value.first;
      v[1][h][x] = value.second;
    } else {
      v[x >> 1][h][x & 1] = value;
    }
  }
};

template <class T, Direction D, class E, bool kPairs, class G>
requires(D != Direction::local) struct PortOf<Tile<T>, D, E, kPairs, G>
    : TileMatrix<D, coda::detail::element_t<T, E>, 1, 1, kPairs, G> {
};
template <class T, Direction D, class E, class G>
requires(D != Direction::local) struct PortOf<HalfTile<T>, D, E, true, G>
    : TileMatrix<D, coda::detail::element_t<T, E>, 1, 2, true, G> {
};
template <class T, Direction D, class E, class G>
requires(D != Direction::local) struct PortOf<DoubleTile<T>, D, E, false, G>
    : TileMatrix<D, coda::detail::element_t<T, E>, 2, 1, false, G> {
};
template <class T, class E, bool kPairs, class G>
struct PortOf<Accumulate<T>, Direction::out, E, kPairs, G>
    : TileMatrix<Direction::out, coda::detail::element_t<T, E>, 1, 1, kPairs, G, true> {
  static_assert(std::is_same_v<T, float>, "on a GPU Accumulate adds float to float");
};

}  // namespace coda::hopper
