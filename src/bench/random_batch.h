// What a training step is measured on.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "llama/model.h"

namespace coda::bench {

/// Random tokens and targets, the same every time: rows of seq tokens, each a document of its own.
class RandomBatch {
 public:
  RandomBatch(int64_t vocab, int64_t rows, int64_t seq)
      : tokens_(static_cast<size_t>(rows * seq)), targets_(tokens_.size()) {
    std::mt19937_64 random(1);
    for (auto* ids : {&tokens_, &targets_})
      for (int32_t& id : *ids) id = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
    for (int64_t i = 0; i <= rows; ++i) starts_.push_back(i * seq);
  }
  llama::Batch batch() const { return {tokens_, targets_, starts_}; }

 private:
  std::vector<int32_t> tokens_, targets_;
  std::vector<int64_t> starts_;
};

}  // namespace coda::bench
