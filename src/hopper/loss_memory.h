// The memory of the vocabulary loss on a GPU, piece by piece. Nothing here needs a GPU.
#pragma once
#include <cstddef>
#include <cstdint>

#include "loss/chunk.h"

namespace coda::hopper {

/// Σ of the losses and of their z parts over kLossTokens tokens.
struct LossSums {
  double all, z;
};
inline constexpr int64_t kLossTokens = 32;

/// Hands out memory piece by piece, at multiples of 256 bytes; from null it counts them.
class Pieces {
 public:
  explicit Pieces(std::byte* memory) : memory_(memory) {}
  int64_t bytes() const { return bytes_; }

  template <class T>
  T* take(int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  Vector<float> vector(int64_t size) { return {take<float>(size), size}; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

struct LossPieces {
  coda::detail::ChunkMemory<bf16> chunk;
  float* ones;      // [chunk]
  LossSums* sums;   // [⌈tokens/32⌉]
  double* divisor;  // one

  /// size.chunk_tokens is not 0.
  LossPieces(Pieces& pieces, const GpuLossSize& size);
};

/// With chunk_tokens filled in. Throws UsageError naming what is wrong.
GpuLossSize checked(GpuLossSize size);

}  // namespace coda::hopper
