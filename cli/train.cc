// coda train: a run from its options, or on from where it stopped.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

#include "coda/error.h"
#include "commands.h"
#include "llama/gpu.h"
#include "option.h"
#include "train/interrupt.h"
#include "train/run.h"
#include "train/sample.h"
#include "train/trainer.h"

namespace coda::cli {
namespace {

namespace fs = std::filesystem;
using train::Options;

constexpr const char* kHelp =
    "Trains a Llama on a text file (its bytes are the tokens) or on a file of token ids.\n\n"
    "  coda train --data play.txt                            a small model, in runs/play\n"
    "  coda train --data play.txt --out DIR --steps 5000 --lr 2e-3 --schedule cosine --warmup 100\n"
    "  coda train --resume runs/play                         go on after Ctrl-C, or a crash\n"
    "  coda train --resume runs/play --steps 9000            go on past the end; steps are the total\n"
    "  coda train --init DIR --data FILE                     from a model in Hugging Face's layout\n"
    "  coda train --data ids.bin --token-type u16 --vocab 32000      ids from examples/tokenize.py\n\n"
    "Into the run's folder go config.json and model.safetensors (Hugging Face's layout), the optimizer's\n"
    "state, run.json (the options), metrics.jsonl (a line a step) and loss.svg (the curve).\n"
    "Ctrl-C or SIGTERM finishes the step, saves, says how to resume and exits with 128 + the signal; a\n"
    "second one quits at once. A save that fails, or a loss that is not finite, ends training; the last\n"
    "checkpoint stays. A resumed run takes its options from run.json; --steps, --threads,\n"
    "--device, --save-every, --eval-every and --keep may be given anew.";

struct Arguments {
  Options options;
  std::vector<double> betas = {0.9, 0.95};
  std::string out, resume, preset;
};

/// The shape of a preset, but for the options that are given themselves.
void apply(const llama::Config& preset, const std::set<std::string>& given, Options& options) {
  const auto set = [&](const char* name, auto& field, auto value) {
    if (!given.contains(name)) field = value;
  };
  set("hidden", options.hidden, preset.hidden);
  set("layers", options.layers, preset.layers);
  set("heads", options.heads, preset.heads);
  set("kv-heads", options.kv_heads, preset.kv_heads);
  set("head-dim", options.head_dim, preset.head_dim);
  set("ffn", options.ffn, preset.ffn);
  set("rope-theta", options.rope_theta, preset.rope_theta);
  set("rms-eps", options.rms_eps, preset.rms_eps);
  set("tie", options.tie, preset.tied);
}

/// The GPU if there is one, unless the options say otherwise; there everything is bf16.
void choose_device(const std::set<std::string>& given, Options& options) {
  if (!given.contains("device")) {
    const bool fp32 = given.contains("dtype") && options.dtype == llama::Dtype::fp32;
    options.device = !fp32 && !llama::why_no_gpu() ? train::DeviceKind::cuda : train::DeviceKind::cpu;
  }
  if (options.device == train::DeviceKind::cuda && !given.contains("dtype")) options.dtype = llama::Dtype::bf16;
}

/// The options that were given, by their names in run.json.
std::set<std::string> given_options(const CLI::App& app) {
  std::set<std::string> given;
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_name().substr(2);
    if (name == "betas") {
      given.insert({"beta1", "beta2"});
    } else {
      given.insert(name);
    }
  }
  return given;
}

/// As a shell takes it for one word.
std::string quoted(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

/// run.json names files so that the run can be resumed from any folder.
void make_absolute(std::string& path) {
  if (!path.empty()) path = fs::absolute(path).lexically_normal().string();
}

void report(train::Trainer& trainer, const Options& options, const train::Outcome& outcome, train::Progress& progress) {
  if (outcome.valid_loss) {
    const int64_t some = trainer.validated_windows(), all = trainer.valid_windows();
    progress.note(fmt::format("valid  loss {:.4f} over {} windows", *outcome.valid_loss,
                              some == all ? fmt::format("all {}", all) : fmt::format("{} of {}", some, all)));
  }
  progress.note(fmt::format("plot   {}", trainer.picture().string()));
  progress.note(fmt::format("model  {}, after {} steps", trainer.dir().string(), outcome.step));
  if (options.token_type != train::TokenType::byte || trainer.model().config().vocab != 256) return;
  constexpr int32_t kPrompt[] = {'\n'};
  // It sees no more than what it was trained on: past that its positions are new to it, and it babbles.
  const train::SampleOptions sampling{.length = 400, .temperature = 0.8, .seed = options.seed, .context = options.seq};
  progress.note(fmt::format("sample at temperature {}:", sampling.temperature));
  progress.note(train::printable(train::sample(trainer.model(), kPrompt, sampling)));
}

int run(const Arguments& arguments, const std::set<std::string>& given, const std::string& program) {
  Options options = arguments.options;
  options.beta1 = arguments.betas.at(0);
  options.beta2 = arguments.betas.at(1);
  make_absolute(options.data);
  make_absolute(options.valid);
  make_absolute(options.init);
  for (const llama::Preset& preset : llama::kPresets)
    if (arguments.preset == preset.name) apply(preset.config, given, options);
  const bool resume = !arguments.resume.empty();
  if (!resume) choose_device(given, options);
  if (resume) options = resumed_options(train::read_run(arguments.resume).options, options, given);
  check(options);
  const fs::path dir = resume                  ? fs::path(arguments.resume)
                       : arguments.out.empty() ? train::free_folder(options.data)
                                               : fs::path(arguments.out);

  Cpu cpu(options.threads);
  train::Trainer trainer(cpu, dir, options, resume ? train::Trainer::Start::resume : train::Trainer::Start::fresh);
  train::Progress progress(std::cout, isatty(STDOUT_FILENO) == 1);
  for (const std::string& line : trainer.description()) progress.note(line);

  train::Outcome outcome;
  {
    const train::Interrupt interrupt;
    outcome = trainer.run(progress, [&] { return interrupt.signal(); });
  }
  if (outcome.signal != 0) {
    progress.note(fmt::format("stopped after step {} of {} and saved; go on with", outcome.step, options.steps));
    progress.note(fmt::format("  {} train --resume {}", quoted(program), quoted(dir.string())));
    return 128 + outcome.signal;
  }
  report(trainer, options, outcome, progress);
  return 0;
}

}  // namespace

Command train_command(CLI::App& coda) {
  CLI::App* app = coda.add_subcommand("train", kHelp);
  const auto arguments = std::make_shared<Arguments>();
  Options& o = arguments->options;
  const auto add = [&](const char* group, const char* name, auto& field, const char* type, const std::string& text) {
    return app->add_option(name, field, text)->option_text(type)->group(group);
  };

  constexpr const char* kData = "Data";
  add(kData, "--data", o.data, "FILE", "what to train on: text, or ids with --token-type; required but with --resume");
  CLI::Option* valid = add(kData, "--valid", o.valid, "FILE", "what to validate on");
  add(kData, "--holdout", o.holdout, "FRACTION", "of --data, its end, to validate on instead [0.05; 0 with --in-order]")
      ->excludes(valid);
  add_token_type(*app, o.token_type)->group(kData);
  add(kData, "--vocab", o.vocab, "V", "number of different ids, with --token-type [--init's]");
  add(kData, "--document-separator", o.document_separator, "ID",
      "this token ends a document; attention and prediction stay inside documents");
  show_default(add(kData, "--batch", o.batch, "B", "rows of a batch"));
  show_default(add(kData, "--seq", o.seq, "T", "tokens of a row"));
  show_default(add(kData, "--accumulate", o.accumulate, "A", "batches whose gradients are added to one step"));
  app->add_flag("--in-order", o.in_order, "read --data from front to end, over and over, not shuffled anew each epoch")
      ->group(kData);
  show_default(add(kData, "--seed", o.seed, "S", "of the order, of fresh weights and of the sample"));

  constexpr const char* kModel = "Model";
  CLI::Option* init = add(kModel, "--init", o.init, "DIR",
                          "start from this model, in its shape; excludes the options of the shape below");
  CLI::Option* preset = add_preset(*app, arguments->preset)->group(kModel)->excludes(init);
  show_default(add(kModel, "--hidden", o.hidden, "N", "width")->excludes(init));
  show_default(add(kModel, "--layers", o.layers, "N", "layers")->excludes(init));
  show_default(add(kModel, "--heads", o.heads, "N", "query heads")->excludes(init));
  show_default(add(kModel, "--kv-heads", o.kv_heads, "N", "key and value heads")->excludes(init));
  add(kModel, "--head-dim", o.head_dim, "N", "width of a head [hidden / heads]")->excludes(init);
  show_default(add(kModel, "--ffn", o.ffn, "N", "width of the MLP")->excludes(init));
  show_default(add(kModel, "--rope-theta", o.rope_theta, "X", "base of the rotary frequencies")->excludes(init));
  show_default(add(kModel, "--rms-eps", o.rms_eps, "X", "eps inside the norms' roots")->excludes(init));
  app->add_flag("--tie", o.tie, "the embedding is the output's weight too")
      ->option_text(" ")
      ->group(kModel)
      ->excludes(init);
  add_dtype(*app, o.dtype, "of weights and activations; masters and the optimizer's state are fp32")->group(kModel);

  constexpr const char* kOptimizer = "Optimizer";
  show_default(add(kOptimizer, "--steps", o.steps, "N", "updates, in total"));
  show_default(add(kOptimizer, "--lr", o.lr, "L", "learning rate"));
  add_choice<train::Schedule::Kind>(
      *app, "--schedule", o.schedule,
      {{"constant", train::Schedule::Kind::constant}, {"cosine", train::Schedule::Kind::cosine}},
      "of the learning rate; the cosine ends at --steps")
      ->group(kOptimizer);
  show_default(add(kOptimizer, "--warmup", o.warmup, "N", "steps over which the learning rate rises from 0"));
  add(kOptimizer, "--min-lr", o.min_lr, "L", "where the cosine ends [a tenth of --lr]");
  show_default(add(kOptimizer, "--weight-decay", o.weight_decay, "X", "AdamW's, of matrices"));
  add(kOptimizer, "--betas", arguments->betas, "B1,B2", "AdamW's [0.9,0.95]")->delimiter(',')->expected(2);
  show_default(add(kOptimizer, "--eps", o.eps, "X", "AdamW's"));
  show_default(add(kOptimizer, "--clip", o.clip, "X", "largest norm of all gradients; 0 does not clip"));

  constexpr const char* kRun = "Run";
  CLI::Option* out = add(kRun, "--out", arguments->out, "DIR",
                         "the run's folder, not one that holds a run [runs/NAME of the data, or NAME-2, …]");
  add(kRun, "--resume", arguments->resume, "DIR", "go on with the run in this folder")
      ->excludes(out)
      ->excludes(init)
      ->excludes(preset);
  add_device(*app, o.device, "where to train, on a GPU in bf16")
      ->option_text("cpu|cuda [cuda where there is a GPU]")
      ->group(kRun);
  show_default(add(kRun, "--threads", o.threads, "N", "0 for all; results do not depend on it"));
  add(kRun, "--eval-every", o.eval_every, "N",
      "steps between validations, on 64 windows at most, 4096 at the end [--steps / 10, at least 10]")
      ->check(CLI::PositiveNumber);
  add(kRun, "--save-every", o.save_every, "N", "steps between checkpoints [about a minute]")
      ->check(CLI::PositiveNumber);
  show_default(
      add(kRun, "--keep", o.keep, "K", "complete checkpoints to keep: the newest is in DIR, older ones in DIR/step-N"));

  return {app, [app, arguments, program = &coda] { return run(*arguments, given_options(*app), program->get_name()); }};
}

}  // namespace coda::cli
