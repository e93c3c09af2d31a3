// Hugging Face's layout: configs in every spelling, weights in one file or in shards, and saves that are cut off.
#include "train/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "coda/error.h"
#include "coda/tensor.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using llama::Config;
using llama::Dtype;
using llama::RopeScaling;
using llama::TensorInfo;

class Folder : public testing::Test {
 protected:
  Folder() {
    std::string name = (fs::temp_directory_path() / "coda-checkpoint-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    dir_ = name;
  }
  ~Folder() override { fs::remove_all(dir_); }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  std::string read(const std::string& name) const {
    std::ifstream stream(dir_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(dir_)) result.insert(entry.path().filename().string());
    return result;
  }

  fs::path dir_;
};

/// What a FileError says; it has to be one line.
template <class Action>
std::string fault_of(Action action) {
  try {
    action();
  } catch (const FileError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 600u) << message;
    return message;
  }
  return "(no fault)";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- config.json

class ConfigFile : public Folder {
 protected:
  Config config_of(const std::string& text) const {
    write("config.json", text);
    return read_config(dir_);
  }
  std::string config_fault(const std::string& text) const {
    return fault_of([&] { config_of(text); });
  }
};

TEST_F(ConfigFile, MissingKeysTakeTheDefaultsOfLlamaConfig) {
  const Config c = config_of("{}");
  EXPECT_EQ(c.vocab, 32000);
  EXPECT_EQ(c.hidden, 4096);
  EXPECT_EQ(c.ffn, 11008);
  EXPECT_EQ(c.layers, 32);
  EXPECT_EQ(c.heads, 32);
  EXPECT_EQ(c.kv_heads, 32);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.max_positions, 2048);
  EXPECT_EQ(c.rms_eps, 1e-6);
  EXPECT_EQ(c.rope_theta, 1e4);
  EXPECT_FALSE(c.tied);
  EXPECT_EQ(c.rope.kind, RopeScaling::Kind::none);
  EXPECT_EQ(read_dtype(dir_), "float32");
}

TEST_F(ConfigFile, NullIsMissingWhereTransformersTakesItSo) {
  const Config c = config_of(R"({"num_attention_heads": 16, "hidden_size": 512, "num_key_value_heads": null,
    "head_dim": null, "rope_scaling": null, "rope_parameters": null, "sliding_window": null, "quantization_config": null,
    "pretraining_tp": null, "torch_dtype": null, "bos_token_id": null, "attention_dropout": null})");
  EXPECT_EQ(c.kv_heads, 16);
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_TRUE(contains(config_fault(R"({"hidden_size": null})"), "hidden_size is null"));
  EXPECT_TRUE(contains(config_fault(R"({"rope_theta": null})"), "rope_theta is null"));
}

TEST_F(ConfigFile, EveryNumberIsTaken) {
  const Config c =
      config_of(R"({"vocab_size": 256, "hidden_size": 320, "intermediate_size": 696, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 777,
    "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0, "pretraining_tp": 1,
    "model_type": "llama", "partial_rotary_factor": 1.0, "sliding_window": 4096, "use_sliding_window": false,
    "layer_types": ["full_attention"], "id2label": {"0": "a"}})");
  EXPECT_EQ(c.vocab, 256);
  EXPECT_EQ(c.hidden, 320);
  EXPECT_EQ(c.ffn, 696);
  EXPECT_EQ(c.layers, 3);
  EXPECT_EQ(c.heads, 6);
  EXPECT_EQ(c.kv_heads, 2);
  EXPECT_EQ(c.head_dim, 48);
  EXPECT_EQ(c.max_positions, 777);
  EXPECT_EQ(c.rms_eps, 1e-5);
  EXPECT_EQ(c.rope_theta, 5e5);
  EXPECT_TRUE(c.tied);
  EXPECT_EQ(read_dtype(dir_), "bfloat16");
}

TEST_F(ConfigFile, RotaryScalingIsReadInEverySpelling) {
  for (const char* text : {R"({"rope_scaling": {"type": "linear", "factor": 4}})",
                           R"({"rope_scaling": {"rope_type": "linear", "factor": 4.0}})",
                           R"({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}})",
                           R"({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}})",
                           R"({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 10000,
                               "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}})"}) {
    const Config c = config_of(text);
    EXPECT_EQ(c.rope.kind, RopeScaling::Kind::linear) << text;
    EXPECT_EQ(c.rope.factor, 4) << text;
    EXPECT_EQ(c.rope_theta, 1e4) << text;
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Config c = config_of(fmt::format(R"({{"{}": {{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
      "low_freq_factor": 1.5, "high_freq_factor": 4.5, "original_max_position_embeddings": 64}}}})",
                                           key));
    EXPECT_EQ(c.rope.kind, RopeScaling::Kind::llama3);
    EXPECT_EQ(c.rope.factor, 8);
    EXPECT_EQ(c.rope.low_freq_factor, 1.5);
    EXPECT_EQ(c.rope.high_freq_factor, 4.5);
    EXPECT_EQ(c.rope.original_max_position_embeddings, 64);
    EXPECT_EQ(c.rope_theta, 5e5);
  }
  EXPECT_EQ(config_of(R"({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}})").rope_theta, 7e4);
  EXPECT_EQ(config_of(R"({"rope_scaling": {}, "rope_theta": 7e4})").rope_theta, 7e4);
  // Nobody says original_max_position_embeddings: the config's own.
  const std::string llama3 =
      R"("rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4)";
  EXPECT_EQ(config_of("{" + llama3 + "}}").rope.original_max_position_embeddings, 2048);
  EXPECT_EQ(
      config_of("{" + llama3 + R"(}, "original_max_position_embeddings": 99})").rope.original_max_position_embeddings,
      99);
}

TEST_F(ConfigFile, SpellingsThatDisagreeAreNamedBoth) {
  const auto names_both = [&](const std::string& text, const std::string& a, const std::string& b) {
    const std::string message = config_fault(text);
    EXPECT_TRUE(contains(message, a) && contains(message, b)) << text << "\n  says: " << message;
  };
  names_both(R"({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})",
             "rope_theta is 10000", "rope_parameters.rope_theta is 500000");
  names_both(
      R"({"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_type": "linear", "factor": 8}})",
      "rope_scaling.factor is 4", "rope_parameters.factor is 8");
  names_both(R"({"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_type": "default"}})",
             "rope_scaling is linear", "rope_parameters is default");
  names_both(R"({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4}})",
             "rope_scaling.type is \"linear\"", "rope_scaling.rope_type is \"llama3\"");
  names_both(
      R"({"original_max_position_embeddings": 64, "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1,
             "high_freq_factor": 4, "original_max_position_embeddings": 65}})",
      "rope_scaling.original_max_position_embeddings is 65", "but original_max_position_embeddings is 64");
}

TEST_F(ConfigFile, OtherMathematicsIsRefusedByName) {
  const char* const refused[][2] = {
      {R"({"model_type": "mistral"})", "model_type is \"mistral\""},
      {R"({"attention_bias": true})", "attention_bias is true"},
      {R"({"mlp_bias": true})", "mlp_bias is true"},
      {R"({"hidden_act": "gelu"})", "hidden_act is \"gelu\""},
      {R"({"hidden_act": null})", "hidden_act is null"},
      {R"({"sliding_window": 4096})", "sliding_window is 4096"},
      {R"({"sliding_window": 4096, "use_sliding_window": true})", "sliding_window is 4096"},
      {R"({"layer_types": ["full_attention", "sliding_attention"]})", "layer_types has \"sliding_attention\""},
      {R"({"quantization_config": {"bits": 4}})", "quantization_config is an object"},
      {R"({"attention_dropout": 0.1})", "attention_dropout is 0.1"},
      {R"({"pretraining_tp": 2})", "pretraining_tp is 2"},
      {R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor is 0.5"},
      {R"({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})",
       "partial_rotary_factor is 0.5"},
      {R"({"logits_scaling": 8})", "logits_scaling is 8"},
      {R"({"embedding_multiplier": 12})", "embedding_multiplier is 12"},
      {R"({"residual_multiplier": 0.22})", "residual_multiplier is 0.22"},
      {R"({"attention_multiplier": 0.01})", "attention_multiplier is 0.01"},
      {R"({"final_logit_softcapping": 30})", "final_logit_softcapping is 30"},
      {R"({"rope_scaling": {"type": "yarn", "factor": 4}})", "rope_scaling.type is \"yarn\""},
      {R"({"rope_scaling": {"type": "dynamic", "factor": 4}})", "\"dynamic\""},
      {R"({"rope_parameters": {"rope_type": "longrope", "factor": 4}})", "rope_parameters.rope_type is \"longrope\""},
      {R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})",
       "rope_parameters has an object as \"full_attention\""},
      {R"({"dtype": "float64"})", "dtype is \"float64\""},
  };
  for (const auto& [text, says] : refused) {
    const std::string message = config_fault(text);
    EXPECT_TRUE(contains(message, says) && contains(message, "config.json: ")) << text << "\n  says: " << message;
  }
}

TEST_F(ConfigFile, WrongTypesAndValuesNameTheKey) {
  const char* const refused[][2] = {
      {R"({"hidden_size": "4096"})", "hidden_size is \"4096\"; it needs a whole number"},
      {R"({"hidden_size": 4096.0})", "hidden_size is 4096.0; it needs a whole number"},
      {R"({"hidden_size": true})", "hidden_size is true"},
      {R"({"hidden_size": [1]})", "hidden_size is a list"},
      {R"({"hidden_size": {"a": 1}})", "hidden_size is an object"},
      {R"({"num_hidden_layers": 0})", "num_hidden_layers is 0"},
      {R"({"num_attention_heads": 0})", "num_attention_heads is 0"},
      {R"({"vocab_size": -5})", "vocab_size is -5"},
      {R"({"vocab_size": 9223372036854775808})", "vocab_size is 9223372036854775808"},
      {R"({"vocab_size": 1e30})", "vocab_size is 1e+30"},
      {R"({"vocab_size": 3000000000})", "vocab is 3000000000"},
      {R"({"rms_norm_eps": "1e-6"})", "rms_norm_eps is \"1e-6\"; it needs a number"},
      {R"({"rms_norm_eps": -1e-6})", "rms_norm_eps is -1e-06"},
      {R"({"rope_theta": 0})", "rope_theta is 0"},
      {R"({"tie_word_embeddings": 1})", "tie_word_embeddings is 1; it needs true or false"},
      {R"({"attention_bias": "no"})", "attention_bias is \"no\""},
      {R"({"attention_dropout": "0"})", "attention_dropout is \"0\""},
      {R"({"model_type": 7})", "model_type is 7"},
      {R"({"torch_dtype": 32})", "torch_dtype is 32"},
      {R"({"layer_types": 3})", "layer_types is 3"},
      {R"({"rope_scaling": "linear"})", "rope_scaling is \"linear\"; it needs an object"},
      {R"({"rope_scaling": {"type": 1}})", "rope_scaling.type is 1"},
      {R"({"rope_scaling": {"type": "linear"}})", "has no rope_scaling.factor"},
      {R"({"rope_scaling": {"type": "linear", "factor": null}})", "rope_scaling.factor is null"},
      {R"({"rope_scaling": {"type": "llama3", "factor": 8}})", "has no rope_scaling.low_freq_factor"},
      {R"({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}})",
       "high_freq_factor is 4; it needs more than rope.low_freq_factor (4)"},
      {R"({"num_key_value_heads": 5})", "heads is 32; it needs a multiple of 5 (kv_heads)"},
      {R"({"hidden_size": 4100, "num_attention_heads": 32})", "without head_dim it needs a multiple"},
      {R"({"head_dim": 40})", "head_dim is 40; it needs a multiple of 16"},
      {R"({"num_hidden_layers": 9223372036854775807})", "too large to address"},
      {"[]", "is not a JSON object"},
      {"", "is not valid JSON"},
      {R"({"a": 1)", "is not valid JSON"},
      {R"({"a": 1e999})", "is not valid JSON"},
      {"{\"a\": \"\xff\"}", "is not valid JSON"},
      {R"({"hidden_size": 64, "hidden_size": 128})", "has \"hidden_size\" twice in one object"},
      {R"({"rope_scaling": {"a\nb": {}}})", "rope_scaling has an object as \"a\\nb\""},
  };
  for (const auto& [text, says] : refused) {
    const std::string message = config_fault(text);
    EXPECT_TRUE(contains(message, says)) << text << "\n  says: " << message << "\n  not: " << says;
  }
}

TEST_F(ConfigFile, DeepHugeAndMissingFilesAreRefused) {
  EXPECT_TRUE(contains(config_fault(std::string(1'000'000, '[')), "nested more than"));
  std::string objects;
  for (int i = 0; i < 10'000; ++i) objects += R"({"a":)";
  EXPECT_TRUE(contains(config_fault(objects), "nested more than"));
  EXPECT_TRUE(contains(config_fault(std::string(1'000'001, ' ')), "at most 1000000"));
  fs::remove(dir_ / "config.json");
  EXPECT_TRUE(contains(fault_of([&] { read_config(dir_); }), "config.json: is not there"));
  fs::create_directory(dir_ / "config.json");
  EXPECT_TRUE(contains(fault_of([&] { read_config(dir_); }), "is not a regular file"));
}

TEST_F(ConfigFile, WhatIsWrittenIsReadBack) {
  Config c = {.vocab = 300,
              .hidden = 64,
              .layers = 2,
              .heads = 4,
              .kv_heads = 2,
              .head_dim = 48,
              .ffn = 72,
              .max_positions = 99,
              .rms_eps = 3e-6,
              .rope_theta = 1.5e5,
              .rope = {},
              .tied = true};
  for (const auto kind : {RopeScaling::Kind::none, RopeScaling::Kind::linear, RopeScaling::Kind::llama3}) {
    c.rope.kind = kind;
    if (kind != RopeScaling::Kind::none) c.rope.factor = 2.5;
    if (kind == RopeScaling::Kind::llama3) {
      c.rope.low_freq_factor = 1.25;
      c.rope.original_max_position_embeddings = 33;
    }
    write_config(dir_, c, Dtype::bf16);
    const Config r = read_config(dir_);
    EXPECT_EQ(r.vocab, c.vocab);
    EXPECT_EQ(r.hidden, c.hidden);
    EXPECT_EQ(r.layers, c.layers);
    EXPECT_EQ(r.heads, c.heads);
    EXPECT_EQ(r.kv_heads, c.kv_heads);
    EXPECT_EQ(r.head_dim, c.head_dim);
    EXPECT_EQ(r.ffn, c.ffn);
    EXPECT_EQ(r.max_positions, c.max_positions);
    EXPECT_EQ(r.rms_eps, c.rms_eps);
    EXPECT_EQ(r.rope_theta, c.rope_theta);
    EXPECT_EQ(r.tied, c.tied);
    EXPECT_EQ(r.rope.kind, c.rope.kind);
    EXPECT_EQ(r.rope.factor, c.rope.factor);
    EXPECT_EQ(r.rope.low_freq_factor, c.rope.low_freq_factor);
    EXPECT_EQ(r.rope.high_freq_factor, c.rope.high_freq_factor);
    EXPECT_EQ(r.rope.original_max_position_embeddings, c.rope.original_max_position_embeddings);
    EXPECT_EQ(read_dtype(dir_), "bfloat16");
  }
  EXPECT_EQ(names(), std::set<std::string>{"config.json"});
  const auto document = nlohmann::json::parse(read("config.json"));
  EXPECT_EQ(document.at("architectures"), nlohmann::json::array({"LlamaForCausalLM"}));
  EXPECT_TRUE(document.at("bos_token_id").is_null());
  EXPECT_TRUE(document.at("eos_token_id").is_null());
}

TEST(ConfigCheck, RefusesWhatDoesNotFit) {
  const auto says = [](auto change) -> std::string {
    Config c;
    change(c);
    try {
      llama::check(c);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(says([](Config&) {}), "");
  EXPECT_EQ(says([](Config& c) { c.layers = 0; }), "layers is 0; it needs a whole number of at least 1");
  EXPECT_EQ(says([](Config& c) { c.kv_heads = 3; }), "heads is 8; it needs a multiple of 3 (kv_heads)");
  EXPECT_EQ(says([](Config& c) { c.head_dim = 24; }), "head_dim is 24; it needs a multiple of 16");
  EXPECT_EQ(says([](Config& c) { c.hidden = 100; }), "hidden is 100; it needs a multiple of 8");
  EXPECT_EQ(says([](Config& c) { c.ffn = 100; }), "ffn is 100; it needs a multiple of 8");
  EXPECT_EQ(says([](Config& c) { c.rms_eps = 0; }), "rms_eps is 0; it needs a finite number above 0");
  EXPECT_EQ(says([](Config& c) { c.rope_theta = NAN; }), "rope_theta is nan; it needs a finite number above 0");
  EXPECT_TRUE(
      contains(says([](Config& c) { c.rms_eps = 1e300; }), "rms_eps is 1e+300; it needs a number from 1.2e-38"));
  EXPECT_TRUE(contains(says([](Config& c) { c.rope_theta = 1e-300; }), "the range of float"));
  EXPECT_NE(says([](Config& c) { c.rope = {.kind = RopeScaling::Kind::linear, .factor = 0}; }), "");
  EXPECT_NE(says([](Config& c) { c.rope = {.kind = RopeScaling::Kind::llama3, .low_freq_factor = 5}; }), "");
  EXPECT_NE(says([](Config& c) { c.hidden = int64_t{1} << 40, c.ffn = int64_t{1} << 40; }), "");
  EXPECT_NE(says([](Config& c) { c.heads = c.kv_heads = int64_t{1} << 62, c.head_dim = 16; }), "");
}

TEST(ConfigCheck, CountsParameters) {
  const Config c = {
      .vocab = 10, .hidden = 8, .layers = 3, .heads = 2, .kv_heads = 1, .head_dim = 16, .ffn = 24, .rope = {}};
  const int64_t layer = 32 * 8 + 2 * 16 * 8 + 8 * 32 + 3 * 24 * 8 + 2 * 8;
  EXPECT_EQ(llama::parameter_count(c), 2 * 10 * 8 + 3 * layer + 8);
  Config tied = c;
  tied.tied = true;
  EXPECT_EQ(llama::parameter_count(tied), 10 * 8 + 3 * layer + 8);
  tied.layers = int64_t{1} << 60;
  EXPECT_THROW(llama::parameter_count(tied), UsageError);
}

// ---- weights

const std::string kEmbedding = "model.embed_tokens.weight", kHead = "lm_head.weight", kNorm = "model.norm.weight";

class Weights : public Folder {
 protected:
  const Config config_ = {
      .vocab = 6, .hidden = 8, .layers = 1, .heads = 1, .kv_heads = 1, .head_dim = 16, .ffn = 8, .rope = {}};
  const std::vector<TensorInfo> tensors_ = {{kEmbedding, {6, 8}}, {kNorm, {8}}, {kHead, {6, 8}}};  // 192, 32, 192 bytes

  /// Values that tell the step and the tensor.
  static void fill(int64_t step, const std::string& name, std::span<float> value) {
    for (size_t i = 0; i < value.size(); ++i) {
      value[i] = static_cast<float>(step) + 0.25f * static_cast<float>(name.size()) + 0.001f * static_cast<float>(i);
    }
  }
  void save(int64_t step, int64_t max_shard_bytes = kDefaultShardBytes, Dtype dtype = Dtype::fp32) const {
    write_checkpoint(
        dir_, config_, dtype, tensors_,
        [&](const std::string& name, std::span<float> value) { fill(step, name, value); }, step, max_shard_bytes);
  }
  void expect_step(int64_t step, Dtype dtype = Dtype::fp32) const {
    const CheckpointReader reader(dir_);
    reader.expect(tensors_);
    ASSERT_EQ(reader.step(), step);
    EXPECT_EQ(reader.metadata().at("format"), "pt");
    for (const TensorInfo& tensor : tensors_) {
      std::vector<float> value(tensor.shape.size() == 1 ? 8 : 48), expected(value.size());
      reader.read(tensor.name, tensor.shape, value);
      fill(step, tensor.name, expected);
      for (size_t i = 0; i < value.size(); ++i) {
        ASSERT_EQ(value[i], dtype == Dtype::fp32 ? expected[i] : float(bf16(expected[i]))) << tensor.name << " " << i;
      }
    }
  }
  /// Runs the action with a limit on the size of files.
  template <class Action>
  static std::string with_file_limit(rlim_t bytes, Action action) {
    rlimit before{};
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    rlimit small = before;
    small.rlim_cur = bytes;
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::string message = fault_of(action);
    setrlimit(RLIMIT_FSIZE, &before);
    return message;
  }
};

TEST_F(Weights, OneFileComesBack) {
  save(7);
  EXPECT_EQ(names(), (std::set<std::string>{"config.json", "model.safetensors"}));
  expect_step(7);
  EXPECT_EQ(read_config(dir_).vocab, 6);
  save(8, kDefaultShardBytes, Dtype::bf16);
  expect_step(8, Dtype::bf16);
  EXPECT_EQ(read_dtype(dir_), "bfloat16");
}

TEST_F(Weights, ShardsComeBack) {
  save(7, 230);  // 192 + 32, 192
  EXPECT_EQ(names(),
            (std::set<std::string>{"config.json", "model.safetensors.index.json", "model-7-00001-of-00002.safetensors",
                                   "model-7-00002-of-00002.safetensors"}));
  expect_step(7);
  const auto index = nlohmann::json::parse(read("model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), 416);
  EXPECT_EQ(index.at("weight_map").at(kHead), "model-7-00002-of-00002.safetensors");
  save(8, 1);  // every tensor is larger than a shard
  expect_step(8);
  remove_stale_weights(dir_);
  expect_step(8);
  EXPECT_EQ(names().size(), 5u);
  EXPECT_FALSE(names().contains("model-7-00001-of-00002.safetensors"));
}

TEST_F(Weights, OneFileAndShardsTakeTurns) {
  save(1);
  save(2, 230);
  expect_step(2);
  EXPECT_FALSE(fs::exists(dir_ / "model.safetensors"));
  save(3);
  expect_step(3);
  EXPECT_FALSE(fs::exists(dir_ / "model.safetensors.index.json"));
  EXPECT_TRUE(fs::exists(dir_ / "model-2-00001-of-00002.safetensors"));
  remove_stale_weights(dir_);
  expect_step(3);
  EXPECT_EQ(names(), (std::set<std::string>{"config.json", "model.safetensors"}));
}

TEST_F(Weights, TheSameStepIsSavedAgainWithoutTouchingItsFiles) {
  save(4, 230);
  const std::string first = read("model-4-00001-of-00002.safetensors");
  write("model-4-00001-of-00002.safetensors", first);
  save(4, 230);
  EXPECT_TRUE(fs::exists(dir_ / "model-4.1-00001-of-00002.safetensors"));
  EXPECT_EQ(read("model-4-00001-of-00002.safetensors"), first);
  expect_step(4);
  remove_stale_weights(dir_);
  expect_step(4);
  EXPECT_EQ(names().size(), 4u);
  EXPECT_FALSE(fs::exists(dir_ / "model-4-00001-of-00002.safetensors"));
}

TEST_F(Weights, AChangeOfFormCutOffInTheMiddleLeavesOneOfTheTwo) {
  // From one file to shards, killed between the index's rename and the old file's removal.
  save(1);
  const std::string one_file = read("model.safetensors");
  save(2, 230);
  write("model.safetensors", one_file);
  expect_step(1);
  remove_stale_weights(dir_);
  expect_step(1);
  EXPECT_EQ(names(), (std::set<std::string>{"config.json", "model.safetensors"}));
  // From shards to one file, killed between the rename and the index's removal.
  save(2, 230);
  const std::string index = read("model.safetensors.index.json");
  save(3);
  write("model.safetensors.index.json", index);
  expect_step(3);
  remove_stale_weights(dir_);
  expect_step(3);
  EXPECT_EQ(names(), (std::set<std::string>{"config.json", "model.safetensors"}));
}

TEST_F(Weights, StaleFilesAreOnlyWhatCodaWrote) {
  save(9, 230);
  const std::set<std::string> others = {"model-00001-of-00002.safetensors",
                                        "optimizer-9.safetensors",
                                        "model-9.safetensors",
                                        "model-x-00001-of-00002.safetensors",
                                        "notes.txt",
                                        "run.json.partial"};
  for (const std::string& name : others) write(name, "x");
  write("model.safetensors.partial", "x");
  write("model.safetensors.index.json.partial", "x");
  write("config.json.partial", "x");
  write("model-8-00001-of-00001.safetensors", "x");
  write("model-8.12-00001-of-00001.safetensors", "x");
  remove_stale_weights(dir_);
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(dir_ / name)) << name;
  EXPECT_EQ(names().size(), others.size() + 4);
  expect_step(9);
  // Without a checkpoint in force nothing is touched.
  fs::remove(dir_ / "model.safetensors.index.json");
  remove_stale_weights(dir_);
  EXPECT_EQ(names().size(), others.size() + 3);
}

TEST_F(Weights, AWriteThatFailsLeavesTheOldCheckpoint) {
  save(1);
  const std::set<std::string> before = names();
  const std::string one_file_fault = with_file_limit(600, [&] { save(2); });
  EXPECT_TRUE(contains(one_file_fault, "cannot be written: File too large")) << one_file_fault;
  expect_step(1);
  EXPECT_EQ(names(), before);
  // config.json is about 600 bytes long; the second shard, two tensors of 192 bytes and the header, is longer.
  const std::string shard_fault = with_file_limit(700, [&] {
    write_checkpoint(
        dir_, config_, Dtype::fp32, {{"a", {6, 8}}, {"b", {6, 8}}, {"c", {6, 8}}, {"d", {6, 8}}, {"e", {60, 8}}},
        [&](const std::string& name, std::span<float> value) { fill(2, name, value); }, 2, 400);
  });
  EXPECT_TRUE(contains(shard_fault, "-of-00003.safetensors: cannot be written: File too large")) << shard_fault;
  expect_step(1);
  EXPECT_EQ(names(), before);
  save(3, 230);
  with_file_limit(100, [&] { save(4, 230); });
  expect_step(3);
}

TEST_F(Weights, AFaultOfGetLeavesTheOldCheckpoint) {
  save(1, 230);
  const std::set<std::string> before = names();
  const auto save_broken = [&](int64_t max_shard_bytes) {
    write_checkpoint(
        dir_, config_, Dtype::fp32, tensors_,
        [](const std::string& name, std::span<float>) {
          if (name == kHead) throw UsageError("no");
        },
        2, max_shard_bytes);
  };
  EXPECT_THROW(save_broken(230), UsageError);
  EXPECT_THROW(save_broken(kDefaultShardBytes), UsageError);
  EXPECT_EQ(names(), before);
  expect_step(1);
}

TEST_F(Weights, WrongTensorsAreNamed) {
  save(1);
  const CheckpointReader reader(dir_);
  const auto says = [&](const std::vector<TensorInfo>& tensors) { return fault_of([&] { reader.expect(tensors); }); };
  EXPECT_EQ(says(tensors_), "(no fault)");
  std::vector<TensorInfo> more = tensors_, fewer = tensors_, other = tensors_;
  for (const char* name : {"a", "b", "c", "d", "e"}) more.push_back({name, {1}});
  EXPECT_TRUE(contains(says(more), R"(lacks "a", "b", "c" and 2 more, which the model needs)")) << says(more);
  fewer.erase(fewer.begin() + 1);
  EXPECT_TRUE(contains(says(fewer), R"(has "model.norm.weight", which the model does not have)")) << says(fewer);
  fewer.push_back({"a", {1}});
  EXPECT_TRUE(contains(says(fewer), R"(lacks "a", which the model needs, and has "model.norm.weight")")) << says(fewer);
  other[0].shape = {8, 6};
  EXPECT_TRUE(contains(says(other), R"(tensor "model.embed_tokens.weight" is [6, 8]; it needs [8, 6])")) << says(other);
  std::vector<float> value(48);
  EXPECT_TRUE(
      contains(fault_of([&] { reader.read(kNorm, std::vector<int64_t>{48}, value); }), "is [8]; it needs [48]"));
  EXPECT_TRUE(contains(fault_of([&] { reader.read("a", std::vector<int64_t>{48}, value); }), "has no tensor \"a\""));
  value.resize(47);
  EXPECT_NE(fault_of([&] { reader.read(kHead, std::vector<int64_t>{6, 8}, value); }), "(no fault)");
}

TEST_F(Weights, ATiedHeadIsAcceptedOnlyIfItIsTheEmbedding) {
  const std::vector<TensorInfo> tied = {{kEmbedding, {6, 8}}};
  const auto save_with_head = [&](float last_of_head, FloatFormat format) {
    const auto fill_with = [](float last) {
      return [last](std::span<float> value) {
        std::ranges::fill(value, 0.5f);
        value.back() = last;
      };
    };
    write_safetensors(dir_ / "model.safetensors",
                      {{.name = kEmbedding, .shape = {6, 8}, .fill = fill_with(0.f)},
                       {.name = kHead, .shape = {6, 8}, .format = format, .fill = fill_with(last_of_head)},
                       {.name = "model.layers.0.self_attn.rotary_emb.inv_freq", .shape = {4}, .fill = fill_with(1.f)}},
                      {});
    return fault_of([&] { CheckpointReader(dir_).expect(tied); });
  };
  EXPECT_EQ(save_with_head(0.f, FloatFormat::f32), "(no fault)");
  EXPECT_TRUE(contains(save_with_head(-0.f, FloatFormat::f32), "differs from"));
  EXPECT_TRUE(contains(save_with_head(0.f, FloatFormat::bf16), "differs from"));
  EXPECT_EQ(CheckpointReader(dir_).step(), std::nullopt);
}

TEST_F(Weights, TensorsThatAreNotFloatsAreRefused) {
  const std::string header = R"({"w":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})";
  const uint64_t size = header.size();
  write("model.safetensors", std::string(reinterpret_cast<const char*>(&size), 8) + header + "1234");
  EXPECT_TRUE(contains(fault_of([&] { CheckpointReader(dir_).expect({{"w", {1}}}); }), "is I32; it needs"));
}

TEST_F(Weights, FoldersWithoutWeightsSaySo) {
  EXPECT_TRUE(contains(fault_of([&] { CheckpointReader reader(dir_); }), "has neither model.safetensors nor"));
  write("pytorch_model.bin", "");
  EXPECT_TRUE(contains(fault_of([&] { CheckpointReader reader(dir_); }), "coda reads safetensors only"));
  EXPECT_TRUE(contains(fault_of([&] { CheckpointReader reader(dir_ / "absent"); }), "is not there"));
}

TEST_F(Weights, DamagedIndexesSayWhatIsWrong) {
  save(1, 230);
  const char* const damages[][2] = {
      {"", "is not valid JSON"},
      {"[]", "is not a JSON object"},
      {"{}", "has no weight_map"},
      {R"({"weight_map": []})", "weight_map is a list"},
      {R"({"weight_map": {"a": 3}})", "weight_map has 3 for \"a\""},
      {R"({"weight_map": {"a": {"b": "c"}}})", "weight_map has an object for \"a\""},
      {R"({"weight_map": {"a": ""}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": ".."}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": "../x.safetensors"}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": "/etc/passwd"}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": "b\\c"}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": "b\u0000c"}})", "needs the name of a file in the same folder"},
      {R"({"weight_map": {"a": "absent.safetensors"}})", "No such file"},
      {R"({"weight_map": {"a": "model-1-00001-of-00002.safetensors"}})", "has no tensor \"a\""},
      {R"({"weight_map": {}, "metadata": 3})", "metadata is 3"},
      {R"({"weight_map": {"a": "config.json"}})", "config.json"},
  };
  for (const auto& [text, says] : damages) {
    write("model.safetensors.index.json", text);
    const std::string message = fault_of([&] { CheckpointReader reader(dir_); });
    EXPECT_TRUE(contains(message, says)) << text << "\n  says: " << message;
  }
  write("model.safetensors.index.json", R"({"weight_map": {"a": )" + std::string(100'000, '['));
  EXPECT_TRUE(contains(fault_of([&] { CheckpointReader reader(dir_); }), "nested more than"));
  write("model.safetensors.index.json", R"({"weight_map": {"model.norm.weight": 1}})");
  EXPECT_NE(fault_of([&] { remove_stale_weights(dir_); }), "(no fault)");
  EXPECT_TRUE(fs::exists(dir_ / "model-1-00001-of-00002.safetensors"));
}

TEST_F(Weights, AStepThatIsNoNumberIsAFault) {
  for (const char* step : {"", "x", "-1", "3x", "99999999999999999999"}) {
    write_safetensors(dir_ / "model.safetensors", {}, {{"step", step}});
    EXPECT_NE(fault_of([&] { CheckpointReader(dir_).step(); }), "(no fault)") << step;
  }
}

}  // namespace
}  // namespace coda::train
