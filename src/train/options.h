// Everything that decides what a training run computes, and how often it saves.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>

#include "data.h"
#include "llama/model.h"
#include "schedule.h"

namespace coda::train {

enum class DeviceKind { cpu, cuda };

/// Fields are named as the options of `coda train` are, and these are their defaults.
struct Options {
  std::string data;
  std::string valid;
  std::optional<double> holdout;  // unset: a default, see holdout_fraction()
  TokenType token_type = TokenType::byte;
  int64_t vocab = 0;  // 0: 256 for bytes, the checkpoint's with init
  std::optional<int64_t> document_separator;
  bool in_order = false;
  uint64_t seed = 0;

  std::string init;
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 8;
  int64_t kv_heads = 4;
  int64_t head_dim = 0;  // 0: hidden / heads
  int64_t ffn = 688;
  double rope_theta = 1e4;
  double rms_eps = 1e-6;
  bool tie = false;
  llama::Dtype dtype = llama::Dtype::fp32;

  int64_t steps = 1000;
  int64_t batch = 8;
  int64_t seq = 256;
  int64_t accumulate = 1;
  double lr = 1e-3;
  Schedule::Kind schedule = Schedule::Kind::constant;
  int64_t warmup = 0;
  std::optional<double> min_lr;  // unset: a tenth of lr
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;

  DeviceKind device = DeviceKind::cpu;
  int threads = 0;         // of the CPU; 0: all
  int64_t eval_every = 0;  // 0: ten times in a run, but not before ten steps
  int64_t save_every = 0;  // 0: about once a minute
  int64_t keep = 1;

  /// A twentieth; nothing with a validation file, and nothing in order, which is the reference's order over all of the file.
  double holdout_fraction() const;
  int64_t evaluation_interval() const;
  Schedule learning_rate() const;
  llama::AdamW optimizer(int64_t step) const;
};

/// Throws UsageError naming the option, what it is and what it needs.
void check(const Options& options);

/// The shape that the options give a fresh model.
llama::Config fresh_config(const Options& options);

/// run.json's object: one key an option, spelled as on the command line without the dashes.
nlohmann::ordered_json to_json(const Options& options);
/// Throws UsageError for a value of the wrong kind.
Options options_from_json(const nlohmann::json& object);

/// The options of a run that goes on: as it was started, and of what is given now --steps, --threads, --save-every,
/// --eval-every, --keep, and where the data now lies. Any other that differs is a UsageError. given has names as in to_json.
Options resumed_options(const Options& started, const Options& now, const std::set<std::string>& given);

}  // namespace coda::train
