// A batch of random documents, packed one after the other.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "llama/model.h"

namespace coda::test {

/// A fifth of the targets is ignored.
struct PackedDocuments {
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> starts;
  int64_t counted = 0;

  PackedDocuments(int64_t vocab, const std::vector<int64_t>& lengths, unsigned seed) {
    std::mt19937 random(seed);
    starts.push_back(0);
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i < length; ++i) {
        tokens.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(vocab)));
        targets.push_back(random() % 5 == 0 ? -100 : static_cast<int32_t>(random() % static_cast<unsigned>(vocab)));
        counted += targets.back() >= 0;
      }
      starts.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
  llama::Batch batch() const { return {tokens, targets, starts}; }
};

}  // namespace coda::test
