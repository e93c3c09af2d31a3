// What makes one Llama different from another: the numbers of Hugging Face's config.json that change the mathematics.
#pragma once
#include <cstdint>

namespace coda::llama {

/// How rotary frequencies are stretched for contexts longer than the training's.
struct RopeScaling {
  enum class Kind { none, linear, llama3 };
  Kind kind = Kind::none;
  double factor = 1;
  double low_freq_factor = 1;  // llama3 only, as are the next two
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};

struct Config {
  int64_t vocab = 256;
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 8;
  int64_t kv_heads = 4;
  int64_t head_dim = 32;
  int64_t ffn = 688;
  int64_t max_positions = 2048;
  double rms_eps = 1e-6;
  double rope_theta = 1e4;
  RopeScaling rope;
  bool tied = false;  // lm_head and the embedding are one parameter

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

/// Number of parameters, a tied embedding counted once.
int64_t parameter_count(const Config&);

/// Throws UsageError naming the field, what it is and what it needs (positive sizes, heads a multiple of kv_heads, head_dim
/// a multiple of 16, ffn and hidden multiples of 8, …).
void check(const Config&);

}  // namespace coda::llama
