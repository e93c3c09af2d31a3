// The order in which training reads its windows: a pure function of a row's number, so that nothing has to be saved.
#pragma once
#include <cstdint>
#include <optional>

namespace coda::train {

/// Rows are numbered through the whole run: row b of micro-batch j of step k is (k * accumulate + j) * batch + b.
class Order {
 public:
  /// Window `row mod windows`: the reference's order.
  static Order in_order(int64_t windows) { return Order(windows, std::nullopt); }
  /// Every window once an epoch, each epoch in a permutation of its own.
  static Order shuffled(int64_t windows, uint64_t seed) { return Order(windows, seed); }

  int64_t window(int64_t row) const;

 private:
  Order(int64_t windows, std::optional<uint64_t> seed) : windows_(windows), seed_(seed) {}

  int64_t windows_;
  std::optional<uint64_t> seed_;
};

}  // namespace coda::train
