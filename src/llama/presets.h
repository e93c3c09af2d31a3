// Shapes that people know by name. The vocabulary comes with the data; positions are not stretched.
#pragma once
#include <string_view>

#include "config.h"

namespace coda::llama {

struct Preset {
  std::string_view name;
  Config config;
};

/// Of Llama 3: hidden size, layers, heads, MLP, frequencies, tied or not.
inline constexpr Preset kPresets[] = {
    {"llama-1b",
     {.vocab = 128256,
      .hidden = 2048,
      .layers = 16,
      .heads = 32,
      .kv_heads = 8,
      .head_dim = 64,
      .ffn = 8192,
      .rms_eps = 1e-5,
      .rope_theta = 5e5,
      .tied = true}},
    {"llama-3b",
     {.vocab = 128256,
      .hidden = 3072,
      .layers = 28,
      .heads = 24,
      .kv_heads = 8,
      .head_dim = 128,
      .ffn = 8192,
      .rms_eps = 1e-5,
      .rope_theta = 5e5,
      .tied = true}},
    {"llama-8b",
     {.vocab = 128256,
      .hidden = 4096,
      .layers = 32,
      .heads = 32,
      .kv_heads = 8,
      .head_dim = 128,
      .ffn = 14336,
      .rms_eps = 1e-5,
      .rope_theta = 5e5}},
};

}  // namespace coda::llama
