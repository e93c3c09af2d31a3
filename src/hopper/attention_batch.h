// The batches that attention's plans are made for, and what their backward pass keeps of the scores. Nothing here needs a GPU.
#pragma once
#include <cstdint>
#include <span>

#include "llama/attention.h"

namespace coda::hopper {

struct AttentionBatch {
  int64_t tokens = 0;     // M, exactly
  int64_t documents = 0;  // one after the other: as many, or, where ragged, up to as many
  int64_t length = 0;     // of each of them, or, where ragged, of the longest
  bool ragged = false;    // of any lengths, which set_documents() says
  /// cuDNN's deterministic backward pass keeps the scores' gradients, 2 bytes · heads · length² a document with length rounded up
  /// to 64: so many documents, or heads of a document, go together as stay within this. Less is slower.
  int64_t score_bytes = int64_t{4} << 30;
};

/// What one launch of the backward pass works on, of what there is.
struct AttentionPart {
  int64_t documents, kv_heads;
};
AttentionPart backward_part(const llama::AttentionShape& shape, const AttentionBatch& batch);

/// What such a launch keeps of the scores' gradients.
int64_t score_gradient_bytes(const llama::AttentionShape& shape, const AttentionBatch& batch);

/// The documents of a model's batch. Those of different lengths share a plan with others: as many and as long as the next power of two.
AttentionBatch model_batch(std::span<const int64_t> document_starts);
AttentionBatch model_batch(int64_t documents, int64_t length);

}  // namespace coda::hopper
