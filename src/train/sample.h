// Text, or ids, that a model goes on with.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "llama/model.h"

namespace coda::train {

struct SampleOptions {
  int64_t length = 256;
  double temperature = 0.8;  // 0 takes the likeliest token
  uint64_t seed = 0;
  int64_t context = 0;  // tokens that the model sees at most; 0 for all of its positions
};

/// The `length` tokens after the prompt, a pure function of the model, the prompt and the options. Throws UsageError for an
/// empty prompt, a token outside the vocabulary, or a negative temperature, length or context.
std::vector<int32_t> sample(llama::Model& model, std::span<const int32_t> prompt, const SampleOptions& options);

/// Tokens of text as a terminal can show them: UTF-8 and line ends as they are, any other byte as \xNN.
std::string printable(std::span<const int32_t> bytes);

}  // namespace coda::train
