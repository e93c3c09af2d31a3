#include "order.h"

#include <algorithm>
#include <bit>

#include "random.h"

namespace coda::train {
namespace {

/// A permutation of [0, size) that stores nothing: a Feistel network permutes the next larger power of four, and a value
/// that falls outside is permuted again until it falls inside. At most four tries on average.
int64_t permute(int64_t index, int64_t size, uint64_t key) {
  constexpr int kRounds = 8;
  const int half = std::max(1, (static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1))) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half;
    uint64_t right = value & mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (mix(key + static_cast<uint64_t>(round) + (right << 8)) & mask);
      left = right;
      right = next;
    }
    value = (left << half) | right;
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

}  // namespace

int64_t Order::window(int64_t row) const {
  const int64_t position = row % windows_;
  if (!seed_) return position;
  const uint64_t epoch = static_cast<uint64_t>(row / windows_);
  return permute(position, windows_, mix(mix(*seed_) + epoch));
}

}  // namespace coda::train
