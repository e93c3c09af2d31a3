#include "checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "coda/error.h"
#include "durable_file.h"
#include "json_file.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using llama::RopeScaling;
using nlohmann::json;

constexpr std::string_view kOneFile = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";
constexpr std::string_view kConfig = "config.json";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kHead = "lm_head.weight";

// In bytes. A parsed value takes up to eight times its text's memory; config.json is a few kB, the index of a thousand layers 1 MB.
constexpr int64_t kLargestConfig = 1'000'000;
constexpr int64_t kLargestIndex = 16'000'000;

/// Values of a JSON object by key, each of the type that is asked for; a FileError names the key.
class Keys {
 public:
  Keys(const fs::path& path, const json& object, std::string prefix = "")
      : path_(path), object_(object), prefix_(std::move(prefix)) {}

  std::string name(std::string_view key) const { return prefix_ + std::string(key); }

  [[noreturn]] void fail(const std::string& trouble) const { throw FileError(path_.string(), trouble); }
  [[noreturn]] void refuse(std::string_view key, const json& got, std::string_view needs) const {
    fail(fmt::format("{} is {}; it needs {}", name(key), shown(got), needs));
  }

  const json* find(std::string_view key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  /// For keys whose null means the default.
  const json* find_unless_null(std::string_view key) const {
    const json* value = find(key);
    return value && value->is_null() ? nullptr : value;
  }

  int64_t size(std::string_view key, const json* value) const {
    const std::optional<int64_t> number = whole_number(*value);
    if (number.value_or(0) < 1) refuse(key, *value, "a whole number from 1 to 2^63 - 1");
    return *number;
  }
  int64_t size(std::string_view key, int64_t fallback) const {
    const json* value = find(key);
    return value ? size(key, value) : fallback;
  }
  int64_t size_unless_null(std::string_view key, int64_t fallback) const {
    const json* value = find_unless_null(key);
    return value ? size(key, value) : fallback;
  }

  double number(std::string_view key, const json* value) const {
    if (!value->is_number()) refuse(key, *value, "a number");
    return value->get<double>();
  }
  double positive(std::string_view key, const json* value) const {
    const double result = number(key, value);
    if (!(result > 0) || !std::isfinite(result)) refuse(key, *value, "a finite number above 0");
    return result;
  }
  double positive(std::string_view key, double fallback) const {
    const json* value = find(key);
    return value ? positive(key, value) : fallback;
  }
  double required_positive(std::string_view key) const {
    const json* value = find(key);
    if (!value) fail(fmt::format("has no {}", name(key)));
    return positive(key, value);
  }

  bool boolean(std::string_view key, bool fallback) const {
    const json* value = find(key);
    if (!value) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
  }

  /// The empty string if there is none, or null.
  std::string text(std::string_view key) const {
    const json* value = find_unless_null(key);
    if (!value) return {};
    if (!value->is_string()) refuse(key, *value, "a string");
    return value->get<std::string>();
  }

  /// An object that is neither missing, null nor empty: transformers takes the three for the same.
  std::optional<Keys> object(std::string_view key) const {
    const json* value = find_unless_null(key);
    if (!value) return std::nullopt;
    if (!value->is_object()) refuse(key, *value, "an object");
    if (value->empty()) return std::nullopt;
    return Keys(path_, *value, name(key) + ".");
  }

  void refuse_objects_inside() const {
    for (const auto& [key, value] : object_.items()) {
      if (!value.is_object()) continue;
      fail(fmt::format("{} has an object as {}; it needs plain values: rotary settings of single layers are not built",
                       prefix_.substr(0, prefix_.size() - 1), quote_name(key)));
    }
  }

 private:
  const fs::path& path_;
  const json& object_;
  std::string prefix_;
};

/// Keys that change the mathematics, with the only value that coda computes; null is that value too.
struct OnlyValue {
  std::string_view key;
  double value;
};
constexpr std::array kOnlyNumbers = {
    OnlyValue{"attention_dropout", 0},     OnlyValue{"hidden_dropout", 0},      OnlyValue{"pretraining_tp", 1},
    OnlyValue{"partial_rotary_factor", 1}, OnlyValue{"logits_scaling", 1},      OnlyValue{"logit_scale", 1},
    OnlyValue{"embedding_multiplier", 1},  OnlyValue{"residual_multiplier", 1}, OnlyValue{"attention_multiplier", 1}};
constexpr std::array<std::string_view, 4> kOnlyFalse = {"attention_bias", "mlp_bias", "use_qk_norm", "qk_layernorm"};
constexpr std::array<std::string_view, 4> kOnlyNull = {"quantization_config", "attn_logit_softcapping",
                                                       "final_logit_softcapping", "compression_config"};

void refuse_other_mathematics(const Keys& keys) {
  const std::string type = keys.text("model_type");
  if (!type.empty() && type != "llama")
    keys.fail(fmt::format("model_type is {}; coda has \"llama\"", quote_name(type)));
  if (const json* act = keys.find("hidden_act"); act && *act != "silu") {
    keys.fail(fmt::format("hidden_act is {}; coda has \"silu\"", shown(*act)));
  }
  for (const std::string_view key : kOnlyFalse) {
    const json* value = keys.find_unless_null(key);
    if (value && keys.boolean(key, false)) keys.fail(fmt::format("{} is true; coda does not have it", key));
  }
  for (const auto& [key, only] : kOnlyNumbers) {
    const json* value = keys.find_unless_null(key);
    if (value && keys.number(key, value) != only) {
      keys.fail(fmt::format("{} is {}; coda has {} only", key, shown(*value), only));
    }
  }
  for (const std::string_view key : kOnlyNull) {
    if (const json* value = keys.find_unless_null(key)) {
      keys.fail(fmt::format("{} is {}; coda does not have it", key, shown(*value)));
    }
  }
  if (const json* window = keys.find_unless_null("sliding_window");
      window && keys.boolean("use_sliding_window", true)) {
    keys.fail(fmt::format("sliding_window is {}; coda attends to the whole document", shown(*window)));
  }
  if (const json* layers = keys.find_unless_null("layer_types")) {
    if (!layers->is_array()) keys.refuse("layer_types", *layers, "a list");
    for (const json& layer : *layers) {
      if (layer != "full_attention") {
        keys.fail(fmt::format("layer_types has {}; coda has \"full_attention\"", shown(layer)));
      }
    }
  }
}

/// One spelling of the rotary settings: rope_scaling, or rope_parameters.
struct Rope {
  std::optional<double> theta;
  RopeScaling scaling;
};

Rope read_rope(const Keys& keys, const Keys& top, int64_t max_positions) {
  keys.refuse_objects_inside();
  Rope rope;
  const std::string old_type = keys.text("type"), new_type = keys.text("rope_type");
  if (!old_type.empty() && !new_type.empty() && old_type != new_type) {
    keys.fail(fmt::format("{} is {} but {} is {}; they must agree", keys.name("type"), quote_name(old_type),
                          keys.name("rope_type"), quote_name(new_type)));
  }
  const std::string_view type_key = new_type.empty() ? "type" : "rope_type";
  const std::string type = new_type.empty() ? old_type : new_type;
  if (const json* theta = keys.find("rope_theta")) rope.theta = keys.positive("rope_theta", theta);
  if (const json* part = keys.find_unless_null("partial_rotary_factor")) {
    if (keys.number("partial_rotary_factor", part) != 1) {
      keys.fail(fmt::format("{} is {}; coda has 1 only", keys.name("partial_rotary_factor"), shown(*part)));
    }
  }

  if (type.empty() || type == "default") return rope;
  if (type == "linear") {
    rope.scaling.kind = RopeScaling::Kind::linear;
    rope.scaling.factor = keys.required_positive("factor");
    return rope;
  }
  if (type != "llama3") {
    keys.fail(fmt::format("{} is {}; coda has \"default\", \"linear\" and \"llama3\"", keys.name(type_key),
                          quote_name(type)));
  }
  rope.scaling.kind = RopeScaling::Kind::llama3;
  rope.scaling.factor = keys.required_positive("factor");
  rope.scaling.low_freq_factor = keys.required_positive("low_freq_factor");
  rope.scaling.high_freq_factor = keys.required_positive("high_freq_factor");
  // Where the object does not say, transformers takes the config's own key, then max_position_embeddings.
  constexpr std::string_view kOriginal = "original_max_position_embeddings";
  const int64_t outside = top.size_unless_null(kOriginal, 0);
  const int64_t inside = keys.size_unless_null(kOriginal, 0);
  if (inside && outside && inside != outside) {
    keys.fail(fmt::format("{} is {} but {} is {}; they must agree", keys.name(kOriginal), inside, kOriginal, outside));
  }
  rope.scaling.original_max_position_embeddings = inside ? inside : outside ? outside : max_positions;
  return rope;
}

std::string_view kind_name(RopeScaling::Kind kind) {
  switch (kind) {
    case RopeScaling::Kind::none:
      return "default";
    case RopeScaling::Kind::linear:
      return "linear";
    case RopeScaling::Kind::llama3:
      return "llama3";
  }
  return "";
}

/// rope_theta and rope_scaling of transformers 4, rope_parameters of transformers 5, or both if they say the same.
void read_rotary(const Keys& top, llama::Config& config) {
  const auto agree = [&](std::string_view name_a, const auto& a, std::string_view name_b, const auto& b) {
    if (a != b) top.fail(fmt::format("{} is {} but {} is {}; they must agree", name_a, a, name_b, b));
  };

  const std::optional<Keys> old_keys = top.object("rope_scaling"), new_keys = top.object("rope_parameters");
  std::optional<Rope> old_rope, new_rope;
  if (old_keys) old_rope = read_rope(*old_keys, top, config.max_positions);
  if (new_keys) new_rope = read_rope(*new_keys, top, config.max_positions);
  if (old_rope && new_rope) {
    const RopeScaling &a = old_rope->scaling, &b = new_rope->scaling;
    agree("the type of rope_scaling", kind_name(a.kind), "the type of rope_parameters", kind_name(b.kind));
    agree("rope_scaling.factor", a.factor, "rope_parameters.factor", b.factor);
    agree("rope_scaling.low_freq_factor", a.low_freq_factor, "rope_parameters.low_freq_factor", b.low_freq_factor);
    agree("rope_scaling.high_freq_factor", a.high_freq_factor, "rope_parameters.high_freq_factor", b.high_freq_factor);
    agree("rope_scaling.original_max_position_embeddings", a.original_max_position_embeddings,
          "rope_parameters.original_max_position_embeddings", b.original_max_position_embeddings);
  }
  if (old_rope) config.rope = old_rope->scaling;
  if (new_rope) config.rope = new_rope->scaling;

  std::optional<std::pair<std::string_view, double>> theta;
  const auto take_theta = [&](std::string_view name, double value) {
    if (theta) agree(theta->first, theta->second, name, value);
    theta = {name, value};
  };
  if (const json* value = top.find("rope_theta")) take_theta("rope_theta", top.positive("rope_theta", value));
  if (old_rope && old_rope->theta) take_theta("rope_scaling.rope_theta", *old_rope->theta);
  if (new_rope && new_rope->theta) take_theta("rope_parameters.rope_theta", *new_rope->theta);
  config.rope_theta = theta ? theta->second : 1e4;
}

std::string dtype_of(const Keys& keys) {
  std::string dtype = keys.text("dtype"), key = "dtype";
  if (dtype.empty()) {
    dtype = keys.text("torch_dtype");
    key = "torch_dtype";
  }
  if (dtype.empty()) return "float32";
  if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
    keys.fail(fmt::format("{} is {}; coda reads \"float32\", \"bfloat16\" and \"float16\"", key, quote_name(dtype)));
  }
  return dtype;
}

/// "a", "b", "c" and 4 more
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string result;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    result += (i == 0 ? "" : ", ") + quote_name(names[i]);
  }
  if (names.size() > kShown) result += fmt::format(" and {} more", names.size() - kShown);
  return result;
}

/// model-<step>[.<attempt>]-<i>-of-<n>.safetensors; transformers' own shards have no step and do not match.
bool is_coda_shard(std::string_view name) {
  const auto take_text = [&](std::string_view text) {
    const bool is_next = name.starts_with(text);
    if (is_next) name.remove_prefix(text.size());
    return is_next;
  };
  const auto take_digits = [&](size_t at_least) {
    const size_t count = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(count);
    return count >= at_least;
  };
  if (!take_text("model-") || !take_digits(1)) return false;
  if (take_text(".") && !take_digits(1)) return false;
  return take_text("-") && take_digits(5) && take_text("-of-") && take_digits(5) && name == ".safetensors";
}

std::vector<std::string> names_in(const fs::path& dir) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  if (error) throw FileError(dir.string(), "cannot be listed: " + error.message());
  return names;
}

struct Index {
  std::map<std::string, std::string> shard_of;  // tensor -> file
  std::map<std::string, std::string> metadata;
};

Index read_index(const fs::path& path) {
  const json document = read_json(path, kLargestIndex);
  const auto fail = [&](const std::string& trouble) { throw FileError(path.string(), trouble); };
  Index index;
  if (const auto metadata = document.find("metadata"); metadata != document.end() && !metadata->is_null()) {
    if (!metadata->is_object()) fail(fmt::format("metadata is {}; it needs an object", shown(*metadata)));
    for (const auto& [key, value] : metadata->items()) {
      index.metadata[key] = value.is_string() ? value.get<std::string>() : value.dump();
    }
  }
  const auto weight_map = document.find("weight_map");
  if (weight_map == document.end()) fail("has no weight_map");
  if (!weight_map->is_object()) fail(fmt::format("weight_map is {}; it needs an object", shown(*weight_map)));
  for (const auto& [tensor, value] : weight_map->items()) {
    if (!value.is_string()) {
      fail(fmt::format("weight_map has {} for {}; it needs a file's name", shown(value), quote_name(tensor)));
    }
    const auto& shard = value.get_ref<const std::string&>();
    const bool plain = !shard.empty() && shard != "." && shard != ".." &&
                       std::ranges::none_of(shard, [](unsigned char c) { return c == '/' || c == '\\' || c < 32; });
    if (!plain) {
      fail(fmt::format("weight_map has {} for {}; it needs the name of a file in the same folder", quote_name(shard),
                       quote_name(tensor)));
    }
    index.shard_of[tensor] = shard;
  }
  return index;
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

llama::Config read_config(const fs::path& dir) {
  const fs::path path = dir / kConfig;
  const json document = read_json(path, kLargestConfig);
  const Keys keys(path, document);
  refuse_other_mathematics(keys);
  dtype_of(keys);

  llama::Config config;
  config.vocab = keys.size("vocab_size", 32000);
  config.hidden = keys.size("hidden_size", 4096);
  config.ffn = keys.size("intermediate_size", 11008);
  config.layers = keys.size("num_hidden_layers", 32);
  config.heads = keys.size("num_attention_heads", 32);
  config.kv_heads = keys.size_unless_null("num_key_value_heads", config.heads);
  if (const json* head_dim = keys.find_unless_null("head_dim")) {
    config.head_dim = keys.size("head_dim", head_dim);
  } else if (config.hidden % config.heads != 0) {
    keys.fail(fmt::format("hidden_size is {}; without head_dim it needs a multiple of num_attention_heads ({})",
                          config.hidden, config.heads));
  } else {
    config.head_dim = config.hidden / config.heads;
  }
  config.max_positions = keys.size("max_position_embeddings", 2048);
  config.rms_eps = keys.positive("rms_norm_eps", 1e-6);
  config.tied = keys.boolean("tie_word_embeddings", false);
  read_rotary(keys, config);
  try {
    llama::check(config);
  } catch (const UsageError& error) {
    throw FileError(path.string(), error.what());
  }
  return config;
}

std::string read_dtype(const fs::path& dir) {
  const fs::path path = dir / kConfig;
  const json document = read_json(path, kLargestConfig);
  return dtype_of(Keys(path, document));
}

void write_config(const fs::path& dir, const llama::Config& config, llama::Dtype dtype) {
  nlohmann::ordered_json scaling;  // null
  if (config.rope.kind != RopeScaling::Kind::none) {
    scaling = {{"rope_type", kind_name(config.rope.kind)}, {"factor", config.rope.factor}};
  }
  if (config.rope.kind == RopeScaling::Kind::llama3) {
    scaling["low_freq_factor"] = config.rope.low_freq_factor;
    scaling["high_freq_factor"] = config.rope.high_freq_factor;
    scaling["original_max_position_embeddings"] = config.rope.original_max_position_embeddings;
  }
  const nlohmann::ordered_json document = {
      {"architectures", nlohmann::ordered_json::array({"LlamaForCausalLM"})},
      {"model_type", "llama"},
      {"vocab_size", config.vocab},
      {"hidden_size", config.hidden},
      {"intermediate_size", config.ffn},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"num_key_value_heads", config.kv_heads},
      {"head_dim", config.head_dim},
      {"max_position_embeddings", config.max_positions},
      {"rms_norm_eps", config.rms_eps},
      {"rope_theta", config.rope_theta},
      {"rope_scaling", scaling},
      {"tie_word_embeddings", config.tied},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"mlp_bias", false},
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"torch_dtype", dtype == llama::Dtype::fp32 ? "float32" : "bfloat16"},
  };
  replace_file(dir / kConfig, document.dump(2) + "\n");
}

CheckpointReader::CheckpointReader(const fs::path& dir) {
  if (is_there(dir / kOneFile)) {
    source_ = dir / kOneFile;
    files_.emplace_back(source_);
    metadata_ = files_[0].metadata();
    for (const auto& [name, tensor] : files_[0].tensors()) file_of_tensor_[name] = 0;
  } else if (is_there(dir / kIndex)) {
    open_shards(dir / kIndex);
  } else if (is_there(dir / "pytorch_model.bin") || is_there(dir / "pytorch_model.bin.index.json")) {
    throw FileError(dir.string(), "has its weights in pytorch_model.bin; coda reads safetensors only");
  } else if (!is_there(dir)) {
    throw FileError(dir.string(), "is not there");
  } else {
    throw FileError(dir.string(), fmt::format("has neither {} nor {}", kOneFile, kIndex));
  }
}

void CheckpointReader::open_shards(const fs::path& path) {
  source_ = path;
  Index index = read_index(path);
  metadata_ = std::move(index.metadata);
  std::map<std::string, size_t> file_of_shard;
  for (const auto& [name, shard] : index.shard_of) {
    const auto [at, is_first] = file_of_shard.emplace(shard, files_.size());
    if (is_first) files_.emplace_back(path.parent_path() / shard);
    if (!files_[at->second].tensors().contains(name)) {
      throw FileError(files_[at->second].path().string(),
                      fmt::format("has no tensor {}, which {} says is there", quote_name(name), kIndex));
    }
    file_of_tensor_[name] = at->second;
  }
}

const SafetensorsFile& CheckpointReader::file_of(const std::string& name) const {
  const auto found = file_of_tensor_.find(name);
  if (found == file_of_tensor_.end()) throw FileError(source_.string(), "has no tensor " + quote_name(name));
  return files_[found->second];
}

void CheckpointReader::check_shape(const std::string& name, std::span<const int64_t> shape) const {
  const SafetensorsFile& file = file_of(name);
  const StoredTensor& tensor = file.find_float(name);
  if (!std::ranges::equal(tensor.shape, shape)) {
    throw FileError(file.path().string(), fmt::format("tensor {} is {}; it needs {}", quote_name(name),
                                                      shape_text(tensor.shape), shape_text(shape)));
  }
}

void CheckpointReader::expect_parameters(const llama::Config& config) const {
  const int64_t wanted = llama::parameter_count(config);
  int64_t held = 0;
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) {
      held += tensor.size();
      if (held >= wanted) return;  // before a sum could overflow
    }
  }
  throw FileError(source_.string(),
                  fmt::format("has {} values, but {} asks for a model of {} parameters", held, kConfig, wanted));
}

void CheckpointReader::expect(const std::vector<llama::TensorInfo>& tensors) const {
  std::set<std::string> wanted;
  std::vector<std::string> missing, unexpected;
  for (const llama::TensorInfo& tensor : tensors) {
    wanted.insert(tensor.name);
    if (!file_of_tensor_.contains(tensor.name)) missing.push_back(tensor.name);
  }
  const std::string head(kHead), embedding(kEmbedding);
  for (const auto& [name, file] : file_of_tensor_) {
    if (wanted.contains(name) || name.ends_with(".rotary_emb.inv_freq")) continue;
    if (name == head && file_of_tensor_.contains(embedding)) {
      if (SafetensorsFile::same(files_[file], head, file_of(embedding), embedding)) continue;
      throw FileError(source_.string(),
                      fmt::format("has {} although tie_word_embeddings is true, and it differs from {}",
                                  quote_name(head), quote_name(embedding)));
    }
    unexpected.push_back(name);
  }
  std::string trouble;
  if (!missing.empty()) trouble = "lacks " + listed(missing) + ", which the model needs";
  if (!unexpected.empty()) {
    trouble += (trouble.empty() ? "has " : ", and has ") + listed(unexpected) + ", which the model does not have";
  }
  if (!trouble.empty()) throw FileError(source_.string(), trouble);
  for (const llama::TensorInfo& tensor : tensors) check_shape(tensor.name, tensor.shape);
}

void CheckpointReader::read(const std::string& name, std::span<const int64_t> shape, std::span<float> value) const {
  check_shape(name, shape);
  file_of(name).read(name, value);
}

std::optional<int64_t> CheckpointReader::step() const {
  const auto found = metadata_.find("step");
  if (found == metadata_.end()) return std::nullopt;
  const std::string& text = found->second;
  int64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (error != std::errc() || end != text.data() + text.size() || step < 0) {
    throw FileError(source_.string(), fmt::format("has {} as step; it needs a whole number", quote_name(text)));
  }
  return step;
}

void write_checkpoint(const fs::path& dir, const llama::Config& config, llama::Dtype dtype,
                      const std::vector<llama::TensorInfo>& tensors,
                      const std::function<void(const std::string& name, std::span<float> value)>& get, int64_t step,
                      int64_t max_shard_bytes) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) throw FileError(dir.string(), "cannot be created: " + error.message());
  write_config(dir, config, dtype);

  // A shard is full when the next tensor would not fit; a tensor larger than the limit has a shard of its own.
  std::vector<std::vector<TensorToWrite>> shards(1);
  int64_t total_bytes = 0, shard_bytes = 0;
  for (const llama::TensorInfo& tensor : tensors) {
    TensorToWrite entry = {.name = tensor.name,
                           .shape = tensor.shape,
                           .format = dtype == llama::Dtype::fp32 ? FloatFormat::f32 : FloatFormat::bf16,
                           .fill = [&get, &tensor](std::span<float> value) { get(tensor.name, value); }};
    const int64_t bytes = entry.bytes();
    if (!shards.back().empty() && shard_bytes + bytes > max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(std::move(entry));
    shard_bytes += bytes;
    total_bytes += bytes;
  }
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"step", std::to_string(step)}};

  if (shards.size() == 1) {
    const fs::path partial = partial_name(dir / kOneFile);
    write_safetensors(partial, shards[0], metadata);
    commit_rename(partial, dir / kOneFile);
    // It has lost already; tools that look for an index first must not find it.
    remove_durably(dir / kIndex);
    return;
  }

  // A save of the same step, cut off or still in force, may be there: its files are not touched.
  const std::vector<std::string> there = names_in(dir);
  std::string prefix;
  for (int attempt = 0;; ++attempt) {
    prefix = fmt::format("model-{}{}-", step, attempt == 0 ? "" : fmt::format(".{}", attempt));
    if (std::ranges::none_of(
            there, [&](const std::string& name) { return name.starts_with(prefix) && is_coda_shard(name); })) {
      break;
    }
  }
  nlohmann::ordered_json index;
  index["metadata"] = metadata;
  index["metadata"]["total_size"] = total_bytes;
  json weight_map = json::object();
  std::vector<fs::path> written;
  try {
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name = fmt::format("{}{:05}-of-{:05}.safetensors", prefix, i + 1, shards.size());
      for (const TensorToWrite& tensor : shards[i]) weight_map[tensor.name] = name;
      write_safetensors(dir / name, shards[i], metadata);
      written.push_back(dir / name);
    }
    index["weight_map"] = weight_map;
    write_file(partial_name(dir / kIndex), index.dump(2) + "\n");
  } catch (...) {
    for (const fs::path& shard : written) fs::remove(shard, error);
    throw;
  }
  // From here on the shards may be in force, whatever goes wrong.
  commit_rename(partial_name(dir / kIndex), dir / kIndex);
  remove_durably(dir / kOneFile);
}

void remove_stale_weights(const fs::path& dir) {
  std::set<std::string> in_force;
  if (is_there(dir / kOneFile)) {
    remove_durably(dir / kIndex);
  } else if (is_there(dir / kIndex)) {
    for (const auto& [tensor, shard] : read_index(dir / kIndex).shard_of) in_force.insert(shard);
  } else {
    return;  // nothing is in force; what is there may be somebody's only copy
  }
  for (const std::string& name : names_in(dir)) {
    const bool stale_shard = is_coda_shard(name) && !in_force.contains(name);
    const bool partial =
        name == partial_name(kOneFile) || name == partial_name(kIndex) || name == partial_name(kConfig);
    if (stale_shard || partial) remove_durably(dir / name);
  }
}

}  // namespace coda::train
