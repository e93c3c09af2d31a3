// coda bench: programs, a block and a training step beside plain products of libraries; programs on a GPU beside cuBLAS.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/contest.h"
#include "bench/gpu.h"
#include "bench/gpu_report.h"
#include "bench/gpu_step.h"
#include "bench/library.h"
#include "bench/rows.h"
#include "bench/step.h"
#include "bench/tuning.h"
#include "coda/error.h"
#include "commands.h"
#include "cpu/isa.h"
#include "llama/gpu.h"
#include "option.h"
#include "train/durable_file.h"

namespace coda::cli {
namespace {

using bench::Time;
using Json = nlohmann::ordered_json;

constexpr const char* kHelp =
    "Times programs, a block of a Llama and a training step on this machine, beside the plain products of the same "
    "shapes by OpenBLAS, LIBXSMM and, if it is given, PyTorch (fp32), and beside OpenBLAS' followed by the program as "
    "one pass over its stored result. All take turns in one run; medians, with the range of the rounds, and medians of "
    "each round's own ratios.\n\n"
    "  coda bench                                 everything\n"
    "  coda bench programs --hidden 1024 --ffn 2816\n"
    "  coda bench programs --torch venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so\n"
    "  coda bench step --layers 8 --json step.json\n\n"
    "On a GPU, programs of a Llama's shapes beside cuBLAS, each named: back to back, as in training, and alone after a "
    "rest.\n\n"
    "  coda bench --device cuda                   every row of the table, at three hidden sizes\n"
    "  coda bench --device cuda residual loss --hidden 4096\n"
    "  coda bench --device cuda step --preset llama-1b --batch 4 --seq 4096       a training step\n"
    "  coda bench --tune                          every plan of these products; the best are kept for later processes\n"
    "  coda bench --tune residual swiglu-keep --hidden 4096 --tokens 8192";

struct Arguments {
  train::DeviceKind device = train::DeviceKind::cpu;
  std::vector<std::string> what;
  bench::Shape shape;
  std::vector<int64_t> hidden;
  std::optional<int64_t> tokens;
  std::optional<int> round_count;
  std::optional<double> warm;
  int64_t layers = 4, rows = 8, seq = 256;
  std::string preset;
  std::optional<int> slices;
  bool tie = false, tune = false;
  llama::Dtype dtype = llama::Dtype::fp32;
  int threads = 0;
  bench::Rounds rounds;
  std::string json, torch;
};

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

Json json_of(const Time& time) {
  return {{"median_s", time.median}, {"low_s", time.low}, {"high_s", time.high}, {"rounds_s", time.rounds}};
}
std::string text_of(const Time& time) {
  return fmt::format("{:8.3f} ({:.3f} to {:.3f})", 1e3 * time.median, 1e3 * time.low, 1e3 * time.high);
}

/// The model of step.
llama::Config step_config(const Arguments& a) {
  llama::Config config;
  config.hidden = a.shape.hidden;
  config.ffn = a.shape.ffn;
  config.heads = a.shape.heads;
  config.kv_heads = a.shape.kv_heads;
  config.head_dim = config.hidden / config.heads;
  config.layers = a.layers;
  config.tied = a.tie;
  if (a.shape.vocab > 0) config.vocab = a.shape.vocab;
  for (const llama::Preset& preset : llama::kPresets)
    if (a.preset == preset.name) config = preset.config;
  config.max_positions = std::max(config.max_positions, a.seq);
  llama::check(config);
  return config;
}

class Bench {
 public:
  explicit Bench(const Arguments& arguments)
      : a_(arguments), cpu_(arguments.threads), openblas_(cpu_.threads()), libxsmm_(cpu_) {
    if (!a_.torch.empty()) libraries_.push_back(&torch_.emplace(a_.torch, cpu_.threads()));
    const std::string isa(cpu::name(cpu::chosen_isa()));
    fmt::print("{}, {} threads; coda runs on {}, OpenBLAS its {} kernels; {} rounds, times in ms\n\n", cpu_model(),
               cpu_.threads(), isa, openblas_.core(), a_.rounds.count);
    json_["machine"] = {
        {"cpu", cpu_model()}, {"threads", cpu_.threads()}, {"coda", isa}, {"openblas", openblas_.core()}};
    json_["shape"] = {{"tokens", a_.shape.tokens},
                      {"hidden", a_.shape.hidden},
                      {"ffn", a_.shape.ffn},
                      {"heads", a_.shape.heads},
                      {"kv_heads", a_.shape.kv_heads},
                      {"vocab", a_.shape.vocab},
                      {"dtype", a_.dtype == llama::Dtype::bf16 ? "bf16" : "fp32"}};
  }

  void programs() {
    const auto block = bench::make_block(cpu_, a_.shape, a_.dtype);
    fmt::print("{:27} {:16} {:>19} {:>25}", "", "program", "M, N, K", "coda");
    for (const bench::Library* library : libraries_) fmt::print(" {:>9}", library->name());
    fmt::print(" {:>9} {:>8} {:>8}\n", "and pass", "÷ plain", "÷ passes");
    for (const bench::Row& row : block->rows()) {
      if (!row.plain) continue;
      // Rounding apart: fp32 sums in another order, or one bf16 here and there.
      double difference = 0;
      std::vector<bench::Entry> entries = {{"coda", row.fused}};
      for (bench::Library* library : libraries_) {
        const double apart = block->difference(row, *library);
        if (!(apart <= (a_.dtype == llama::Dtype::bf16 ? 2e-2 : 1e-4)))
          throw Error(
              fmt::format("{}: coda and {} are {:.2g} of the largest value apart", row.name, library->name(), apart));
        difference = std::max(difference, apart);
        entries.push_back({library->name(), [&row, library] { row.plain(*library); }});
      }
      if (row.pass)
        entries.push_back({"OpenBLAS and pass", [&] {
                             row.plain(openblas_);
                             row.pass();
                           }});
      const std::vector<Time> times = bench::measure(entries, a_.rounds);
      fmt::print("{:27} {:16} {:>19} {:>25}", row.name, row.program,
                 fmt::format("{}, {}, {} {}", row.m, row.n, row.k, bench::name(row.form)), text_of(times[0]));
      double ratio = 0;  // over the fastest of the libraries: the largest
      for (size_t i = 1; i <= libraries_.size(); ++i) {
        ratio = std::max(ratio, bench::ratio(times[0], times[i]));
        fmt::print(" {:9.3f}", 1e3 * times[i].median);
      }
      fmt::print(" {:>9} {:8.2f} {:>8}\n", row.pass ? fmt::format("{:.3f}", 1e3 * times.back().median) : "", ratio,
                 row.pass ? fmt::format("{:.2f}", bench::ratio(times[0], times.back())) : "");
      std::fflush(stdout);
      Json entry = {
          {"name", row.name}, {"program", row.program}, {"form", bench::name(row.form)}, {"m", row.m}, {"n", row.n},
          {"k", row.k},       {"flops", row.flops()},   {"difference", difference}};
      for (size_t i = 0; i < entries.size(); ++i) entry["times"][entries[i].name] = json_of(times[i]);
      entry["ratio_to_plain"] = ratio;
      if (row.pass) entry["ratio_to_passes"] = bench::ratio(times[0], times.back());
      json_["programs"].push_back(entry);
    }
    fmt::print(
        "\n÷ plain: coda over the fastest of the plain products. ÷ passes: over OpenBLAS' product and one pass of the "
        "program.\n\n");
  }

  void block() {
    const auto block = bench::make_block(cpu_, a_.shape, a_.dtype);
    for (const bool backward : {false, true}) {
      std::vector<const bench::Row*> rows;
      for (const bench::Row& row : block->rows())
        if (row.in_block && (backward || !row.backward)) rows.push_back(&row);
      const auto fused = [&rows] {
        for (const bench::Row* row : rows) row->fused();
      };
      const auto passes = [&rows, this] {
        for (const bench::Row* row : rows) {
          if (row->plain) row->plain(openblas_);
          if (row->pass) row->pass();
        }
      };
      std::vector<bench::Entry> entries = {{"coda", fused}};
      for (bench::Library* library : libraries_)
        entries.push_back({library->name(), [&rows, library] {
                             for (const bench::Row* row : rows)
                               if (row->plain) row->plain(*library);
                           }});
      entries.push_back({"OpenBLAS and passes", passes});
      const std::vector<Time> times = bench::measure(entries, a_.rounds);
      const std::string name = backward ? "block, forward and backward" : "block, forward";
      fmt::print("{} ({} products, no attention)\n", name,
                 std::ranges::count_if(rows, [](const bench::Row* row) { return row->plain != nullptr; }));
      Json entry = {{"name", name}};
      for (size_t i = 0; i < entries.size(); ++i) {
        const double ratio = bench::ratio(times[i], times[0]);
        fmt::print("  {:20} {:>30}   {:.2f}\n", entries[i].name, text_of(times[i]), ratio);
        entry["times"][entries[i].name] = json_of(times[i]);
        entry["ratio_to_coda"][entries[i].name] = ratio;
      }
      json_["blocks"].push_back(entry);
    }
    fmt::print("\n");
  }

  void step() {
    const llama::Config config = step_config(a_);
    const bench::StepReport r = bench::bench_step(cpu_, openblas_, config, a_.dtype, a_.rows, a_.seq, a_.rounds);
    const double whole = r.step.median;
    fmt::print("training step of {:.1f} million parameters, {} x {} tokens: {:.0f} tokens/s\n",
               1e-6 * static_cast<double>(r.parameters), a_.rows, a_.seq, static_cast<double>(r.tokens) / whole);
    const auto line = [&](const char* name, const Time& time) {
      fmt::print("  {:40} {:>30}   {:3.0f} %\n", name, text_of(time), 100 * time.median / whole);
      json_["step"]["times"][name] = json_of(time);
    };
    line("step", r.step);
    line("forward and backward", r.forward_backward);
    fmt::print("  {:40} {:8.3f} {:>23} {:3.0f} %\n", "update (the rest of the step)",
               1e3 * (whole - r.forward_backward.median), "", 100 * (1 - r.forward_backward.median / whole));
    line("attention, forward and backward", r.attention);
    line("OpenBLAS' products of the same shapes", r.products);
    fmt::print("  {:.1f} GFLOP in products; everything but them costs {:.0f} % of the step\n", 1e-9 * r.product_flops,
               100 * (1 - r.products.median / whole));
    fmt::print("  memory: {:.1f} MB before the first step, {:.1f} MB more at the peak of a step\n",
               1e-6 * static_cast<double>(r.bytes_before), 1e-6 * static_cast<double>(r.bytes_of_step));
    json_["step"]["tokens"] = r.tokens;
    json_["step"]["parameters"] = r.parameters;
    json_["step"]["product_flops"] = r.product_flops;
    json_["step"]["bytes_before"] = r.bytes_before;
    json_["step"]["bytes_of_step"] = r.bytes_of_step;
  }

  void write() const {
    if (a_.json.empty()) return;
    train::write_file(a_.json, json_.dump(2) + "\n");
  }

 private:
  const Arguments& a_;
  Cpu cpu_;
  bench::OpenBlas openblas_;
  bench::Libxsmm libxsmm_;
  std::optional<bench::TorchMm> torch_;
  std::vector<bench::Library*> libraries_{&openblas_, &libxsmm_};
  Json json_;
};

int run_cpu(Arguments arguments) {
  for (const std::string& what : arguments.what)
    if (what != "programs" && what != "block" && what != "step")
      throw UsageError(fmt::format("{} is not one of programs, block, step", what));
  if (arguments.hidden.size() > 1) throw UsageError("--hidden takes one size on the CPU");
  bench::Shape& shape = arguments.shape;
  if (!arguments.hidden.empty()) shape.hidden = arguments.hidden[0];
  shape.tokens = arguments.tokens.value_or(shape.tokens);
  arguments.rounds.count = arguments.round_count.value_or(arguments.rounds.count);
  if (shape.hidden % shape.heads != 0)
    throw UsageError(fmt::format("--hidden is {}; it needs a multiple of --heads, {}", shape.hidden, shape.heads));
  if (shape.heads % shape.kv_heads != 0)
    throw UsageError(fmt::format("--heads is {}; it needs a multiple of --kv-heads, {}", shape.heads, shape.kv_heads));
  if (shape.hidden / shape.heads % 16 != 0)
    throw UsageError(fmt::format("a head is {} wide; it needs a multiple of 16", shape.hidden / shape.heads));
  if (shape.ffn % 8 != 0) throw UsageError(fmt::format("--ffn is {}; it needs a multiple of 8", shape.ffn));
  const auto wanted = [&](const std::string& what) {
    return arguments.what.empty() || std::ranges::find(arguments.what, what) != arguments.what.end();
  };
  Bench bench(arguments);
  if (wanted("programs")) bench.programs();
  if (wanted("block")) bench.block();
  if (wanted("step")) bench.step();
  bench.write();
  return 0;
}

bench::GpuOptions gpu_options(const Arguments& arguments) {
  bench::GpuOptions options;
  options.rows = arguments.what;
  if (!arguments.hidden.empty()) options.hidden = arguments.hidden;
  for (const int64_t hidden : options.hidden)
    if (hidden % 128 != 0) throw UsageError(fmt::format("--hidden is {}; it needs a multiple of a head's 128", hidden));
  options.tokens = arguments.tokens.value_or(options.tokens);
  options.rounds = arguments.round_count.value_or(options.rounds);
  options.cool_rounds = std::max(1, options.rounds / 3);
  options.warm_seconds = arguments.warm.value_or(options.warm_seconds);
  options.slices = arguments.slices.value_or(options.slices);
  (void)bench::gpu_cases(options);  // refuses rows that there are not
  return options;
}

constexpr const char* kNoGpuHalf = "this coda was built without its GPU half, which `make cuda` builds";

int run_tune(const Arguments& arguments) {
  bench::GpuOptions options = gpu_options(arguments);
  constexpr double kWarm = 0.5;  // one product follows the other: the card is warm
  constexpr int kRounds = 5;     // of a quarter of a second a plan
  options.warm_seconds = arguments.warm.value_or(kWarm);
  options.rounds = arguments.round_count.value_or(kRounds);
  if (bench::tune_gpu == nullptr) throw UsageError(fmt::format("--tune: {}", kNoGpuHalf));
  const auto path = hopper::plan_cache_path();
  if (!path) throw UsageError("--tune: there is no folder for the plans; CODA_CACHE names one");

  const bench::TuneReport report = bench::tune_gpu(options, [&](const bench::TuneReport& so_far) {
    if (so_far.results.empty()) {
      fmt::print("{}", bench::tune_table_head(so_far));
    } else {
      const bench::TuneResult& last = so_far.results.back();
      fmt::print("{}", bench::text_of(last));
      // After every product: a run that is cut short has found something.
      if (last.failure.empty()) bench::record_plans(*path, std::vector{bench::entry_of(last, so_far.card)});
    }
    std::fflush(stdout);
    if (!arguments.json.empty()) train::write_file(arguments.json, bench::json_of(so_far));
  });
  fmt::print("{}plans: {}\n", bench::tune_summary(report), path->string());
  const auto failures =
      std::ranges::count_if(report.results, [](const auto& result) { return !result.failure.empty(); });
  if (failures > 0) throw Error(fmt::format("{} of {} products were not measured", failures, report.results.size()));
  return 0;
}

int run_gpu(const Arguments& arguments) {
  const bench::GpuOptions options = gpu_options(arguments);
  if (bench::bench_gpu == nullptr) throw UsageError(fmt::format("--device cuda: {}", kNoGpuHalf));

  int64_t hidden = 0;
  const bench::GpuReport report = bench::bench_gpu(options, [&](const bench::GpuReport& so_far) {
    if (so_far.results.empty()) {
      fmt::print("{}", bench::text_of(so_far.machine));
    } else {
      const bench::GpuResult& last = so_far.results.back();
      if (last.product.hidden != hidden) fmt::print("{}", bench::gpu_table_head(so_far, last.product.hidden));
      hidden = last.product.hidden;
      fmt::print("{}", bench::text_of(last));
    }
    std::fflush(stdout);
    // After every case: a run that is cut short has measured something.
    if (!arguments.json.empty()) train::write_file(arguments.json, bench::json_of(so_far));
  });
  fmt::print("{}", bench::gpu_means_table(report));
  const auto failures =
      std::ranges::count_if(report.results, [](const auto& result) { return !result.failure.empty(); });
  if (failures > 0) throw Error(fmt::format("{} of {} cases were not timed", failures, report.results.size()));
  return 0;
}

int run_gpu_step(const Arguments& arguments) {
  const llama::Config config = step_config(arguments);
  if (const auto missing = llama::why_no_gpu()) throw UsageError("--device cuda: " + *missing);
  bench::Rounds rounds{.count = arguments.round_count.value_or(7), .seconds = 2};
  const bench::GpuStepReport r = bench::bench_gpu_step(config, arguments.rows, arguments.seq, rounds);
  const double whole = r.step.median;
  fmt::print("training step of {:.1f} million parameters, {} x {} tokens: {:.0f} tokens/s, {:.0f} TFLOP/s\n",
             1e-6 * static_cast<double>(r.parameters), arguments.rows, arguments.seq,
             static_cast<double>(r.tokens) / whole, 1e-12 * r.flops / whole);
  fmt::print("  step, ms                  {}\n  forward and backward, ms  {}\n", text_of(r.step),
             text_of(r.forward_backward));
  fmt::print("  memory of the device: {:.2f} GB, {:.2f} GB of them parameters, gradients and moments\n",
             1e-9 * static_cast<double>(r.bytes), 1e-9 * static_cast<double>(r.bytes_of_model));
  if (arguments.json.empty()) return 0;
  const Json json = {{"step",
                      {{"times", {{"step", json_of(r.step)}, {"forward and backward", json_of(r.forward_backward)}}},
                       {"tokens", r.tokens},
                       {"parameters", r.parameters},
                       {"flops", r.flops},
                       {"bytes", r.bytes},
                       {"bytes_of_model", r.bytes_of_model}}}};
  train::write_file(arguments.json, json.dump(2) + "\n");
  return 0;
}

int run(const CLI::App& app, const Arguments& arguments) {
  const auto refuse = [&](std::initializer_list<const char*> options, const char* device) {
    for (const char* option : options)
      if (app.count(option) > 0) throw UsageError(fmt::format("{} means nothing with --device {}", option, device));
  };
  const std::initializer_list<const char*> models = {"--ffn",    "--heads",  "--kv-heads", "--vocab",
                                                     "--layers", "--preset", "--tie",      "--batch",
                                                     "--seq",    "--dtype",  "--threads",  "--torch"};
  if (arguments.tune) {
    if (app.count("--device") > 0 && arguments.device == train::DeviceKind::cpu)
      throw UsageError("--tune is of a GPU's plans; --device is cpu");
    for (const char* option : models)
      if (app.count(option) > 0) throw UsageError(fmt::format("{} means nothing with --tune", option));
    if (app.count("--slices") > 0) throw UsageError("--slices means nothing with --tune: plans are of whole products");
    return run_tune(arguments);
  }
  if (arguments.device == train::DeviceKind::cuda && arguments.what == std::vector<std::string>{"step"}) {
    refuse({"--tokens", "--warm", "--slices", "--dtype", "--threads", "--torch"}, "cuda");
    if (arguments.hidden.size() > 1) throw UsageError("--hidden takes one size for step");
    Arguments one = arguments;
    if (!arguments.hidden.empty()) one.shape.hidden = arguments.hidden[0];
    return run_gpu_step(one);
  }
  if (arguments.device == train::DeviceKind::cuda) {
    refuse(models, "cuda");
    return run_gpu(arguments);
  }
  refuse({"--warm", "--slices"}, "cpu");
  return run_cpu(arguments);
}

}  // namespace

Command bench_command(CLI::App& coda) {
  CLI::App* app = coda.add_subcommand("bench", kHelp);
  const auto a = std::make_shared<Arguments>();
  const auto size = CLI::Range(int64_t{1}, int64_t{1} << 20, "1 to 1048576");
  std::string rows;
  for (const bench::GpuRow& row : bench::gpu_rows()) rows += (rows.empty() ? "" : ", ") + std::string(row.name);
  app->add_option("WHAT", a->what, "programs, block, step [all]; on a GPU step alone, or rows: " + rows)
      ->option_text("...");
  add_device(*app, a->device, "where coda runs");
  app->add_option("--tokens", a->tokens, "rows of programs and block")
      ->option_text(fmt::format("M [{}; {} on a GPU]", a->shape.tokens, bench::GpuOptions{}.tokens))
      ->check(size);
  app->add_option("--hidden", a->hidden, "width of the stream; several on a GPU")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->option_text(fmt::format("D [{}; {} on a GPU]", a->shape.hidden, fmt::join(bench::GpuOptions{}.hidden, ",")))
      ->check(size);
  show_default(app->add_option("--ffn", a->shape.ffn, "width of the feed-forward")->option_text("F")->check(size));
  show_default(app->add_option("--heads", a->shape.heads, "of queries")->option_text("H")->check(size));
  show_default(app->add_option("--kv-heads", a->shape.kv_heads, "of keys and values")->option_text("H")->check(size));
  app->add_option("--vocab", a->shape.vocab, "the loss too, over so many tokens [none; 256 for step]")
      ->option_text("V")
      ->check(size);
  CLI::Option* preset = add_preset(*app, a->preset)->description("step's model");
  app->add_flag("--tie", a->tie, "step's embedding is the output's weight too")->option_text(" ");
  show_default(app->add_option("--layers", a->layers, "of step's model")->option_text("L")->check(size));
  show_default(app->add_option("--batch", a->rows, "rows of step's batch")->option_text("B")->check(size));
  show_default(app->add_option("--seq", a->seq, "tokens of such a row")->option_text("T")->check(size));
  add_dtype(*app, a->dtype, "of activations and weights");
  show_default(app->add_option("--threads", a->threads, "0 for all")->option_text("N"));
  app->add_option("--rounds", a->round_count, "turns of each; on a GPU a third as many of single launches")
      ->option_text(fmt::format("N [{}; {} on a GPU]", a->rounds.count, bench::GpuOptions{}.rounds))
      ->check(CLI::Range(1, 1000, "1 to 1000"));
  app->add_option("--warm", a->warm, "load on a GPU before the first round of each case")
      ->option_text(fmt::format("SECONDS [{:.0f}]", bench::GpuOptions{}.warm_seconds))
      ->check(CLI::Range(0.0, 60.0, "0 to 60"));
  app->add_option("--slices", a->slices,
                  "slices of the depth that coda multiplies a GPU's rows in; 0: as it predicts is best")
      ->option_text("N [1]")
      ->check(CLI::Range(0, 1024, "0 to 1024"));
  app->add_flag("--tune", a->tune, "measures plans on a GPU and keeps the best")->option_text(" ");
  app->add_option("--torch", a->torch, "PyTorch's torch/lib/libtorch_cpu.so: torch.mm is a plain product too")
      ->option_text("FILE");
  app->add_option("--json", a->json, "writes the figures there too")->option_text("FILE");
  for (const char* part : {"--hidden", "--ffn", "--heads", "--kv-heads", "--vocab", "--layers", "--tie"})
    preset->excludes(app->get_option(part));
  return {app, [app, a] { return run(*app, *a); }};
}

}  // namespace coda::cli
