// What a model checks and makes of a batch before it starts.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "model.h"

namespace coda::llama {

/// Throws OperandError naming row and value of a token or target that is not in the vocabulary, or what else is wrong.
void check_batch(const Batch& batch, int64_t vocab);

/// Of every token in its document.
std::vector<int32_t> positions_of(std::span<const int64_t> document_starts);

}  // namespace coda::llama
