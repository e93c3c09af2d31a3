#include "batch.h"

#include <fmt/format.h>

#include <algorithm>

#include "coda/error.h"
#include "coda/loss.h"

namespace coda::llama {

void check_batch(const Batch& batch, int64_t vocab) {
  const auto check_ids = [&](std::span<const int32_t> ids, const char* name, bool may_be_ignored) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool valid = (ids[i] >= 0 && ids[i] < vocab) || (may_be_ignored && ids[i] == kIgnoreIndex);
      if (!valid)
        throw OperandError(
            fmt::format("{} of row {}", name, i), fmt::format("{}", ids[i]),
            fmt::format("an id from 0 to {}{}", vocab - 1, may_be_ignored ? ", or -100 to be ignored" : ""));
    }
  };
  if (batch.targets.size() != batch.tokens.size())
    throw OperandError("targets", fmt::format("{} values", batch.targets.size()),
                       fmt::format("one for each of the {} tokens", batch.tokens.size()));
  check_ids(batch.tokens, "token", false);
  check_ids(batch.targets, "target", true);
  const auto& starts = batch.document_starts;
  if (starts.empty() || starts.front() != 0 || starts.back() != static_cast<int64_t>(batch.tokens.size()) ||
      !std::is_sorted(starts.begin(), starts.end()))
    throw OperandError("document_starts", fmt::format("{} values", starts.size()),
                       fmt::format("ascending values from 0 to the number of tokens, {}", batch.tokens.size()));
}

std::vector<int32_t> positions_of(std::span<const int64_t> document_starts) {
  std::vector<int32_t> positions;
  for (size_t document = 0; document + 1 < document_starts.size(); ++document)
    for (int64_t i = document_starts[document]; i < document_starts[document + 1]; ++i)
      positions.push_back(static_cast<int32_t>(i - document_starts[document]));
  return positions;
}

}  // namespace coda::llama
