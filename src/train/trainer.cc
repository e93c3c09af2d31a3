#include "trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "checkpoint.h"
#include "coda/error.h"
#include "llama/gpu.h"
#include "llama/memory.h"
#include "plot.h"
#include "state.h"
#include "version.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Validation on the way is to cost a few steps' time, the last one may cost more.
constexpr int64_t kValidWindows = 64;
constexpr int64_t kLastValidWindows = 4096;

constexpr double kSaveInterval = 60;  // seconds
constexpr double kSaveShare = 0.1;    // of the time, at most: a large model's file takes long to write

double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

/// 3.26 M, 19.3 k
std::string counted(int64_t count) {
  const double value = static_cast<double>(count);
  if (value >= 1e9) return fmt::format("{:.2f} G", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f} M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:.1f} k", value / 1e3);
  return std::to_string(count);
}

std::optional<int32_t> separator_of(const Options& options, int64_t vocab) {
  if (!options.document_separator) return std::nullopt;
  if (*options.document_separator >= vocab) {
    throw UsageError(
        fmt::format("--document-separator is {}, but the vocabulary is {}", *options.document_separator, vocab));
  }
  return static_cast<int32_t>(*options.document_separator);
}

/// Where the model's shape comes from: the run's own checkpoint, another's, or the options.
llama::Config config_of(const Options& options, const fs::path& dir, bool saved) {
  if (!saved && options.init.empty()) return fresh_config(options);
  llama::Config config = read_model_config(saved ? dir : fs::path(options.init));
  if (options.vocab > config.vocab) {
    throw UsageError(fmt::format("--vocab is {}, but the checkpoint's is {}", options.vocab, config.vocab));
  }
  if (options.seq > config.max_positions) {
    throw UsageError(fmt::format("--seq is {}, but the checkpoint has {} positions (max_position_embeddings)",
                                 options.seq, config.max_positions));
  }
  return config;
}

}  // namespace

Trainer::Trainer(Cpu& cpu, const fs::path& dir, const Options& options, Start start)
    : options_(options), dir_(dir), threads_(cpu.threads()) {
  check(options_);
  const bool resume = start == Start::resume;
  std::optional<RunRecord> before;
  if (resume) {
    before = read_run(dir_);
    saved_ = saved_step(dir_);
    if (saved_.value_or(0) > options_.steps) {
      throw UsageError(
          fmt::format("--steps is {}, but the run in {} has done {} already", options_.steps, dir_.string(), *saved_));
    }
  } else {
    refuse_to_overwrite(dir_);
  }

  const llama::Config config = config_of(options_, dir_, saved_.has_value());
  const int64_t ids = options_.vocab > 0 ? options_.vocab : config.vocab;
  separator_of(options_, ids);
  data_ = std::make_unique<TokenFile>(options_.data, options_.token_type, ids);
  if (!options_.valid.empty()) {
    valid_data_ = std::make_unique<TokenFile>(options_.valid, options_.token_type, ids);
  }
  RunRecord record{.options = options_, .version = kVersion, .data = DataRecord::of(*data_), .valid = std::nullopt};
  if (valid_data_) record.valid = DataRecord::of(*valid_data_);
  if (before) {
    refuse_changed_data(before->data, record.data);
    if (before->valid) refuse_changed_data(*before->valid, *record.valid);
  }

  int64_t train_tokens = data_->size();
  if (valid_data_) {
    valid_.emplace(*valid_data_, 0, valid_data_->size(), options_.seq);
  } else if (options_.holdout_fraction() > 0) {
    const int64_t split = holdout_start(data_->size(), options_.holdout_fraction());
    // Nobody asked for the default: a file too short for it is trained on whole.
    if (options_.holdout || Windows::fit(data_->size() - split, options_.seq)) {
      train_tokens = split;
      valid_.emplace(*data_, split, data_->size() - split, options_.seq);
    }
  }
  windows_.emplace(*data_, 0, train_tokens, options_.seq);
  order_ = options_.in_order ? Order::in_order(windows_->count()) : Order::shuffled(windows_->count(), options_.seed);
  llama::check_memory("the rows of a step (--batch, --seq, --accumulate)",
                      8.0 * static_cast<double>(options_.batch * options_.seq * options_.accumulate));
  rows_.resize(static_cast<size_t>(options_.accumulate));

  model_ =
      options_.device == DeviceKind::cuda
          ? llama::make_model_on_gpu(
                config, llama::GpuStep{.rows = options_.batch, .seq = options_.seq, .validates = valid_.has_value()})
          : std::make_unique<llama::Model>(cpu, config, options_.dtype);
  if (saved_) {
    load_state(dir_, *model_);
    step_ = model_->updates();
  } else if (!options_.init.empty()) {
    load_weights(options_.init, *model_);
  } else {
    model_->initialize(options_.seed);
  }

  std::error_code error;
  fs::create_directories(dir_, error);
  if (error) throw FileError(dir_.string(), "cannot be created: " + error.message());
  lock_ = std::make_unique<FolderLock>(dir_);
  // Again, now that nobody else can come between.
  if (!resume) refuse_to_overwrite(dir_);
  if (resume && saved_step(dir_) != saved_)
    throw UsageError(dir_.string() + ": another process has just trained there");
  write_run(dir_, record);
  metrics_ = std::make_unique<MetricsLog>((dir_ / "metrics.jsonl").string(), step_);
}

Trainer::~Trainer() = default;

std::vector<std::string> Trainer::description() const {
  const llama::Config& c = model_->config();
  const int64_t tokens = options_.batch * options_.seq * options_.accumulate;
  const double epochs = static_cast<double>(options_.steps) *
                        static_cast<double>(options_.batch * options_.accumulate) /
                        static_cast<double>(windows_->count());
  std::vector<std::string> lines;
  lines.push_back(fmt::format("data   {}: {} tokens, {} windows of {} to train on{}", data_->path(),
                              counted(data_->size()), windows_->count(), options_.seq,
                              valid_ ? fmt::format(", {} to validate on", valid_->count()) : ""));
  const std::string device = options_.device == DeviceKind::cuda
                                 ? "on the GPU"
                                 : fmt::format("{} thread{}", threads_, threads_ == 1 ? "" : "s");
  lines.push_back(
      fmt::format("model  {} parameters: hidden {}, layers {}, heads {} over {}, ffn {}, vocabulary {}; {}, {}",
                  counted(llama::parameter_count(c)), c.hidden, c.layers, c.heads, c.kv_heads, c.ffn, c.vocab,
                  options_.dtype == llama::Dtype::fp32 ? "fp32" : "bf16", device));
  lines.push_back(fmt::format("run    {}: {} steps of {} tokens, {:.2f} epochs{}", dir_.string(), options_.steps,
                              tokens, epochs, step_ > 0 ? fmt::format("; goes on at step {}", step_) : ""));
  return lines;
}

int64_t Trainer::validated_windows() const {
  return std::min(valid_windows(), kLastValidWindows);
}

StepMetrics Trainer::train_step(Progress& progress) {
  // All of the step's rows come first: the divisor is known when the first gradient is made.
  std::vector<int64_t> indices(static_cast<size_t>(options_.batch));
  int64_t row = step_ * options_.accumulate * options_.batch;
  int64_t counted = 0;
  for (Rows& rows : rows_) {
    for (int64_t& index : indices) index = order_->window(row++);
    rows.gather(*windows_, indices, separator_of(options_, model_->config().vocab));
    counted += rows.counted();
  }
  if (counted == 0) {
    progress.note(fmt::format("step {}: no target counts, all of them follow --document-separator's token", step_));
  }
  const double divisor = static_cast<double>(std::max<int64_t>(1, counted));

  double sum = 0;
  for (const Rows& rows : rows_) {
    const double loss = model_->forward_backward(rows.batch(), divisor);
    if (!std::isfinite(loss)) refuse(not_finite_message("loss", loss, model_->find_not_finite(rows.batch())));
    sum += loss;
  }
  const llama::AdamW optimizer = options_.optimizer(step_);
  const double norm = model_->update(optimizer);
  if (!std::isfinite(norm)) refuse(not_finite_message("gradient's norm", norm, model_->find_not_finite_gradient()));
  return {
      .step = step_, .loss = sum / divisor, .grad_norm = norm, .tokens_per_s = 0, .lr = optimizer.lr, .valid_loss = {}};
}

void Trainer::refuse(const std::string& trouble) const {
  throw Error(fmt::format(
      "step {}: {}; stopped, and {}. A lower --lr, or --warmup, may help", step_, trouble,
      saved_ ? fmt::format("the checkpoint of step {} in {} stays", *saved_, dir_.string()) : "nothing is saved"));
}

std::optional<double> Trainer::validate(bool last, const std::function<int()>& stop) {
  Evaluation evaluation = Evaluation::spread(valid_->count(), last ? kLastValidWindows : kValidWindows, options_.batch,
                                             separator_of(options_, model_->config().vocab));
  if (last) evaluation.stop = [&] { return stop() != 0; };
  try {
    return mean_loss(*model_, *valid_, evaluation);
  } catch (const NotFinite& fault) {
    refuse(fmt::format("in validation {}", fault.what()));
  }
}

void Trainer::save() {
  if (saved_ == step_) return;
  // An update can overflow although its gradient was finite.
  std::vector<float> value;
  for (const llama::StateTensor& state : model_->optimizer_state()) {
    value.resize(static_cast<size_t>(state.size));
    model_->get_state(state, value);
    if (std::ranges::all_of(value, [](float x) { return std::isfinite(x); })) continue;
    refuse("the update made a value that is not finite, in " + model_->find_not_finite_weight().value_or(state.name));
  }
  // The lines of the steps that the checkpoint has behind it must not be lost when it is not.
  metrics_->sync();
  save_state(dir_, *model_, {.seed = options_.seed, .keep = options_.keep});
  saved_ = step_;
  write_loss_svg(picture().string(), metrics_->steps(), title());
}

std::string Trainer::title() const {
  const fs::path folder = dir_.has_filename() ? dir_ : dir_.parent_path();
  return fmt::format("{}: {} parameters on {}", folder.filename().string(),
                     counted(llama::parameter_count(model_->config())), fs::path(data_->path()).filename().string());
}

Outcome Trainer::run(Progress& progress, const std::function<int()>& stop) {
  Outcome outcome;
  const double tokens = static_cast<double>(options_.batch * options_.seq * options_.accumulate);
  progress.start(step_, options_.steps);
  Clock::time_point last_save = Clock::now();
  double pause = kSaveInterval;
  // A step's time runs from here to after its update, so that it has the logging of the step before in it.
  Clock::time_point begin = Clock::now();
  while (step_ < options_.steps && outcome.signal == 0) {
    StepMetrics metrics = train_step(progress);
    metrics.tokens_per_s = tokens / std::max(1e-9, seconds_since(begin));
    begin = Clock::now();
    ++step_;
    const bool last = step_ == options_.steps;
    if (valid_ && (last || step_ % options_.evaluation_interval() == 0)) {
      metrics.valid_loss = validate(last, stop);
      begin = Clock::now();
    }
    metrics_->append(metrics);
    progress.step(metrics);
    if (!last) outcome.signal = stop();

    const bool due = options_.save_every > 0 ? step_ % options_.save_every == 0 : seconds_since(last_save) >= pause;
    if (due || last || outcome.signal != 0) {
      const Clock::time_point save_begin = Clock::now();
      save();
      pause = std::max(kSaveInterval, seconds_since(save_begin) / kSaveShare);
      last_save = begin = Clock::now();
    }
  }
  outcome.step = step_;
  if (!metrics_->steps().empty()) outcome.valid_loss = metrics_->steps().back().valid_loss;
  return outcome;
}

}  // namespace coda::train
