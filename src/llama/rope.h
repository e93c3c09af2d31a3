// Rotary frequencies of a config, as the programs of coda/programs/rope.h take them.
#pragma once
#include <vector>

#include "coda/rotary.h"
#include "config.h"

namespace coda::llama {

/// Radians per position of the head_dim/2 pairs of a head: theta^(-2i/head_dim), stretched as config.rope says, rounded to
/// float as Hugging Face's are.
std::vector<float> rotary_frequencies(const Config& config);

/// The same in turns per position for every pair of a qkv row, [qkv_width/2]; 0 for the pairs of v.
RotaryTurns rotary_turns(const Config& config);

}  // namespace coda::llama
