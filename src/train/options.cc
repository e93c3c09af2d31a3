#include "options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "coda/error.h"
#include "json_file.h"

namespace coda::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// What a resumed run may do to an option.
enum class OnResume { keeps, may_change };

/// The one list of options: their names and fields.
template <class Options, class Visit>
void for_each_option(Options& o, Visit visit) {
  constexpr auto kKeeps = OnResume::keeps, kMayChange = OnResume::may_change;
  // A run whose data was moved goes on; that the contents are the same is for the hash to say.
  visit("data", o.data, kMayChange);
  visit("valid", o.valid, kMayChange);
  visit("holdout", o.holdout, kKeeps);
  visit("token-type", o.token_type, kKeeps);
  visit("vocab", o.vocab, kKeeps);
  visit("document-separator", o.document_separator, kKeeps);
  visit("in-order", o.in_order, kKeeps);
  visit("seed", o.seed, kKeeps);
  visit("init", o.init, kKeeps);
  visit("hidden", o.hidden, kKeeps);
  visit("layers", o.layers, kKeeps);
  visit("heads", o.heads, kKeeps);
  visit("kv-heads", o.kv_heads, kKeeps);
  visit("head-dim", o.head_dim, kKeeps);
  visit("ffn", o.ffn, kKeeps);
  visit("rope-theta", o.rope_theta, kKeeps);
  visit("rms-eps", o.rms_eps, kKeeps);
  visit("tie", o.tie, kKeeps);
  visit("dtype", o.dtype, kKeeps);
  visit("steps", o.steps, kMayChange);
  visit("batch", o.batch, kKeeps);
  visit("seq", o.seq, kKeeps);
  visit("accumulate", o.accumulate, kKeeps);
  visit("lr", o.lr, kKeeps);
  visit("schedule", o.schedule, kKeeps);
  visit("warmup", o.warmup, kKeeps);
  visit("min-lr", o.min_lr, kKeeps);
  visit("weight-decay", o.weight_decay, kKeeps);
  visit("beta1", o.beta1, kKeeps);
  visit("beta2", o.beta2, kKeeps);
  visit("eps", o.eps, kKeeps);
  visit("clip", o.clip, kKeeps);
  visit("device", o.device, kMayChange);
  visit("threads", o.threads, kMayChange);
  visit("eval-every", o.eval_every, kMayChange);
  visit("save-every", o.save_every, kMayChange);
  visit("keep", o.keep, kMayChange);
}

struct WrongKind {};

// A value as JSON and back. An option that is not set is null; the words are those of the command line.
template <class T>
ordered_json encode(const T& value) {
  return value;
}
template <class T>
ordered_json encode(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}
ordered_json encode(TokenType value) {
  return value == TokenType::byte ? "byte" : value == TokenType::u16 ? "u16" : "u32";
}
ordered_json encode(Schedule::Kind value) {
  return value == Schedule::Kind::constant ? "constant" : "cosine";
}
ordered_json encode(llama::Dtype value) {
  return value == llama::Dtype::fp32 ? "fp32" : "bf16";
}

ordered_json encode(DeviceKind value) {
  return value == DeviceKind::cpu ? "cpu" : "cuda";
}

template <class Enum>
void decode_word(const json& value, Enum& field, std::initializer_list<Enum> choices) {
  for (const Enum choice : choices) {
    if (encode(choice) == value.get<std::string>()) {
      field = choice;
      return;
    }
  }
  throw WrongKind{};
}
template <class T>
void decode(const json& value, T& field) {
  // get() would take true for 1, cut a fraction off, and wrap what does not fit around.
  if constexpr (std::is_same_v<T, double>) {
    if (!value.is_number()) throw WrongKind{};
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    if (!value.is_number_unsigned() && whole_number(value).value_or(-1) < 0) throw WrongKind{};
  } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    const std::optional<int64_t> number = whole_number(value);
    if (!number || !std::in_range<T>(*number)) throw WrongKind{};
  }
  field = value.get<T>();
  if constexpr (std::is_same_v<T, std::string>) {
    if (field.find('\0') != std::string::npos) throw WrongKind{};  // the system would take a path up to there
  }
}
template <class T>
void decode(const json& value, std::optional<T>& field) {
  if (value.is_null()) {
    field.reset();
  } else {
    decode(value, field.emplace());
  }
}
void decode(const json& value, TokenType& field) {
  decode_word(value, field, {TokenType::byte, TokenType::u16, TokenType::u32});
}
void decode(const json& value, Schedule::Kind& field) {
  decode_word(value, field, {Schedule::Kind::constant, Schedule::Kind::cosine});
}
void decode(const json& value, llama::Dtype& field) {
  decode_word(value, field, {llama::Dtype::fp32, llama::Dtype::bf16});
}

void decode(const json& value, DeviceKind& field) {
  decode_word(value, field, {DeviceKind::cpu, DeviceKind::cuda});
}

void require(bool holds, const char* option, double value, const char* needs) {
  if (!holds) throw UsageError(fmt::format("--{} is {}; it needs {}", option, value, needs));
}

}  // namespace

double Options::holdout_fraction() const {
  if (holdout) return *holdout;
  return in_order || !valid.empty() ? 0 : 0.05;
}

int64_t Options::evaluation_interval() const {
  return eval_every > 0 ? eval_every : std::max<int64_t>(10, steps / 10);
}

Schedule Options::learning_rate() const {
  return {.kind = schedule, .lr = lr, .min_lr = min_lr.value_or(lr / 10), .warmup = warmup, .steps = steps};
}

llama::AdamW Options::optimizer(int64_t step) const {
  return {.lr = learning_rate().at(step),
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = eps,
          .weight_decay = weight_decay,
          .clip = clip};
}

void check(const Options& o) {
  if (o.data.empty()) throw UsageError("--data is missing; it names the text or the token file to train on");
  if (!o.valid.empty() && o.holdout.value_or(0) > 0) {
    throw UsageError("--valid and --holdout exclude each other: validation is on the one or the other");
  }
  if (o.token_type == TokenType::byte && o.vocab != 0) {
    throw UsageError("--vocab needs --token-type: text is bytes, a vocabulary of 256");
  }
  if (o.token_type != TokenType::byte && o.vocab == 0 && o.init.empty()) {
    throw UsageError("--token-type needs --vocab, the number of different ids");
  }
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  constexpr double kIds = 2147483647.0;
  if (o.token_type != TokenType::byte) {
    require(o.vocab >= 0 && real(o.vocab) <= kIds, "vocab", real(o.vocab), "1 to 2147483647");
  }
  if (o.document_separator) {
    require(*o.document_separator >= 0 && real(*o.document_separator) <= kIds, "document-separator",
            real(*o.document_separator), "an id of the vocabulary");
  }
  const double holdout = o.holdout.value_or(0);
  require(holdout >= 0 && holdout < 1, "holdout", holdout, "a fraction, at least 0 and below 1");
  constexpr const char* kPositive = "a whole number of at least 1";
  require(o.steps >= 1, "steps", real(o.steps), kPositive);
  require(o.batch >= 1, "batch", real(o.batch), kPositive);
  require(o.seq >= 1, "seq", real(o.seq), kPositive);
  require(o.accumulate >= 1, "accumulate", real(o.accumulate), kPositive);
  // Attention and activations of a step have to fit: past 2^40 tokens a count of bytes would not even fit 64 bits.
  require(real(o.batch) * real(o.seq) * real(o.accumulate) <= 0x1p40, "batch", real(o.batch),
          "times --seq and --accumulate at most 2^40 tokens");
  require(real(o.steps) * real(o.batch) * real(o.accumulate) <= 0x1p62, "steps", real(o.steps),
          "times --batch and --accumulate at most 2^62 rows");
  require(o.keep >= 1, "keep", real(o.keep), kPositive);
  require(o.eval_every >= 0, "eval-every", real(o.eval_every), kPositive);
  require(o.save_every >= 0, "save-every", real(o.save_every), kPositive);
  require(o.threads >= 0, "threads", o.threads, "at least 1, or 0 for all");
  require(o.warmup >= 0, "warmup", real(o.warmup), "a whole number of at least 0");
  require(o.lr >= 0 && std::isfinite(o.lr), "lr", o.lr, "a finite number of at least 0");
  const double min_lr = o.min_lr.value_or(0);
  require(min_lr >= 0 && min_lr <= o.lr, "min-lr", min_lr, "at least 0 and at most --lr");
  require(o.weight_decay >= 0 && std::isfinite(o.weight_decay), "weight-decay", o.weight_decay,
          "a finite number of at least 0");
  require(o.beta1 >= 0 && o.beta1 < 1, "betas", o.beta1, "two numbers, at least 0 and below 1");
  require(o.beta2 >= 0 && o.beta2 < 1, "betas", o.beta2, "two numbers, at least 0 and below 1");
  require(o.eps > 0 && std::isfinite(o.eps), "eps", o.eps, "a finite number above 0");
  if (o.device == DeviceKind::cuda && o.dtype == llama::Dtype::fp32) {
    throw UsageError("--dtype is fp32; --device cuda trains in bf16, with masters, gradients and moments in fp32");
  }
  require(o.clip >= 0 && std::isfinite(o.clip), "clip", o.clip, "a finite number, 0 to not clip");
}

llama::Config fresh_config(const Options& o) {
  llama::Config config;
  config.vocab = o.token_type == TokenType::byte ? 256 : o.vocab;
  config.hidden = o.hidden;
  config.layers = o.layers;
  config.heads = o.heads;
  config.kv_heads = o.kv_heads;
  config.head_dim = o.head_dim;
  config.ffn = o.ffn;
  config.rope_theta = o.rope_theta;
  config.rms_eps = o.rms_eps;
  config.tied = o.tie;
  config.max_positions = std::max<int64_t>(2048, o.seq);
  if (o.head_dim == 0) {
    if (o.heads < 1) throw UsageError(fmt::format("--heads is {}; it needs a whole number of at least 1", o.heads));
    if (o.hidden % o.heads != 0) {
      throw UsageError(
          fmt::format("--hidden is {}; without --head-dim it needs a multiple of --heads ({})", o.hidden, o.heads));
    }
    config.head_dim = o.hidden / o.heads;
  }
  llama::check(config);
  return config;
}

ordered_json to_json(const Options& options) {
  ordered_json object = ordered_json::object();
  for_each_option(options, [&](const char* name, const auto& field, OnResume) { object[name] = encode(field); });
  return object;
}

Options options_from_json(const json& object) {
  if (!object.is_object()) throw UsageError("the options are not an object");
  Options options;
  for_each_option(options, [&](const char* name, auto& field, OnResume) {
    const auto found = object.find(name);
    if (found == object.end()) return;  // from before the option was there: its default
    const auto refuse = [&] {
      throw UsageError(fmt::format("the option {} is {}, which it cannot be", name, shown(*found)));
    };
    try {
      decode(*found, field);
    } catch (const json::exception&) {
      refuse();
    } catch (const WrongKind&) {
      refuse();
    }
  });
  return options;
}

Options resumed_options(const Options& started, const Options& now, const std::set<std::string>& given) {
  json merged = to_json(started);
  const json wanted = to_json(now);
  for_each_option(started, [&](const std::string& name, const auto&, OnResume on_resume) {
    if (!given.contains(name) || wanted[name] == merged[name]) return;
    // A validation file that comes or goes changes what is held out, and with it what is trained on.
    const bool comes_or_goes = name == "valid" && (started.valid.empty() || now.valid.empty());
    if (on_resume == OnResume::keeps || comes_or_goes) {
      const std::string option = name == "beta1" || name == "beta2" ? "betas" : name;
      throw UsageError(fmt::format("--{} is {} but the run was started with {}; a resumed run keeps it", option,
                                   wanted[name].dump(), merged[name].dump()));
    }
    merged[name] = wanted[name];
  });
  return options_from_json(merged);
}

}  // namespace coda::train
