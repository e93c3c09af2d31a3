// coda explain: what a program, or a Llama layer made of programs, reads, writes and computes.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "coda/error.h"
#include "coda/loss.h"
#include "commands.h"
#include "explain/picture.h"
#include "explain/report.h"
#include "hopper/plan_cache.h"
#include "llama/gpu.h"
#include "option.h"
#include "train/durable_file.h"

namespace coda::cli {
namespace {

constexpr const char* kHelp =
    "Says what an epilogue program reads, writes and reduces, what its product costs fused and unfused, and how the "
    "CPU\n"
    "engine and a GPU would run it; `coda explain block` the same of a Llama layer. Nothing is computed.\n\n"
    "  coda explain                                               the programs\n"
    "  coda explain RmsNormSwiGlu                                 its operands\n"
    "  coda explain 'RmsNormSwiGlu<bf16, DropGateUp>' --m 16384 --n 16384 --k 2048 --machine h200\n"
    "  coda explain Store --m 16384 --n 4096 --k 2048 --form NN --device cuda\n"
    "  coda explain block --hidden 2048 --ffn 8192 --tokens 16384 --machine this\n"
    "  coda explain block --help";

constexpr const char* kBlockHelp =
    "Every product of a Llama layer, forward and backward, and of the vocabulary loss with --vocab: its shape, its "
    "program,\n"
    "FLOPs and bytes, what is kept for the backward pass; the same layer unfused; and the ratio.\n\n"
    "  coda explain block --hidden 2048 --ffn 8192 --tokens 16384 --machine h200\n"
    "  coda explain block --preset llama-1b --tokens 16384 --machine h200          with the plans and the memory of a "
    "GPU\n"
    "  coda explain block --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --tokens 8192 --vocab 128256 --svg "
    "layer.svg";

struct Output {
  train::DeviceKind device = train::DeviceKind::cpu;
  std::string machine;
  std::optional<double> tflops, tbps;
  llama::Dtype dtype = llama::Dtype::bf16;
  std::string json;
  CLI::Option* json_option = nullptr;

  ElementType element() const { return dtype == llama::Dtype::bf16 ? ElementType::bfloat16 : ElementType::float32; }

  void add_machine(CLI::App& app) {
    add_device(app, device, "cuda: with the plans of this machine's GPU; those of an H100 or H200 come with --machine");
    app.add_option("--machine", machine, "for predicted times: peaks of data sheets, or this one, measured")
        ->option_text("h100|h200|this");
    app.add_option("--tflops", tflops, "the machine's rate of products")->option_text("X");
    app.add_option("--tbps", tbps, "its memory's bandwidth, in TB/s")->option_text("X");
  }
  void add_json(CLI::App& app) {
    json_option = app.add_option("--json", json, "JSON instead: into FILE, or onto the terminal")
                      ->option_text("[FILE]")
                      ->expected(0, 1);
  }
  /// The GPU whose plans are asked for: of bf16, which is what it multiplies.
  std::optional<explain::Card> card(ElementType element) const {
    if (device == train::DeviceKind::cuda) {
      if (element != ElementType::bfloat16) throw UsageError("--device cuda: a GPU's products are of bf16");
      if (const auto missing = llama::why_no_gpu()) throw UsageError("--device cuda: " + *missing);
      return explain::current_card();
    }
    return element == ElementType::bfloat16 ? explain::card_of(machine) : std::nullopt;
  }
  template <class Report>
  void write(const Report& report) const {
    const bool to_file = json_option->count() > 0 && !json.empty();
    if (to_file) train::write_file(json, explain::json(report).dump(1) + "\n");
    if (json_option->count() > 0 && !to_file)
      fmt::print("{}\n", explain::json(report).dump(1));
    else
      fmt::print("{}", explain::text(report));
  }
};

struct ProgramArguments {
  std::string program;
  std::optional<int64_t> m, n, k;
  std::optional<coda::detail::Form> form;
  Output output;
};

struct BlockArguments {
  explain::Block block;
  std::string preset;
  std::string svg;
  Output output;
};

std::optional<explain::Sizes> sizes(const ProgramArguments& a) {
  if (!a.m && !a.n && !a.k) return {};
  if (!a.m || !a.n) throw UsageError("--m and --n are needed together, and --k with them for a product");
  return explain::Sizes{*a.m, *a.n, a.k};
}

int run(const ProgramArguments& a) {
  if (a.program.empty()) {
    fmt::print("{}", explain::program_list());
    return 0;
  }
  const explain::Program& program = explain::find_program(a.program);
  const auto given = sizes(a);
  if (given) check(program, *given);
  const auto machine = explain::machine(a.output.machine, a.output.tflops, a.output.tbps, program.element);
  if (machine && !given) throw UsageError("a predicted time needs --m, --n and --k");
  explain::ProgramReport report{program, given, machine, cpu_plan(program, Cpu().threads())};
  const auto card = a.output.card(program.element);
  if (a.form && !card)
    throw UsageError("--form is of a GPU's plans; they come with --device cuda, --machine h100 or h200");
  if (card && a.output.device == train::DeviceKind::cuda && (!given || !given->k))
    throw UsageError("--device cuda: a product's plans need --m, --n and --k");
  if (card && given && given->k) {
    report.card = card;
    report.gpu_plans = explain::gpu_plans(program, *given, a.form, *card, hopper::tuned_plans());
  }
  a.output.write(report);
  return 0;
}

int run(const BlockArguments& a) {
  explain::Block block = a.block;
  block.element = a.output.element();
  std::optional<llama::Config> model;
  for (const llama::Preset& preset : llama::kPresets)
    if (a.preset == preset.name) model = preset.config;
  if (model) {
    block.hidden = model->hidden;
    block.ffn = model->ffn;
    block.heads = model->heads;
    block.kv_heads = model->kv_heads;
    block.head_dim = model->head_dim;
    block.vocab = model->vocab;
  }
  const auto card = a.output.card(block.element);
  // A GPU's chunks are its own.
  if ((model || card) && block.vocab && block.chunk == 0 && block.tokens > 0)
    block.chunk = GpuLinearCrossEntropy::chunk_tokens(block.tokens);
  block = completed(block);
  const auto machine = explain::machine(a.output.machine, a.output.tflops, a.output.tbps, block.element);
  explain::BlockReport report{block, rows(block), machine};
  if (card) {
    report.card = card;
    report.gpu_plans = explain::gpu_plans(block, report.rows, *card, hopper::tuned_plans());
  }
  if (model && block.element == ElementType::bfloat16) {
    if (block.tokens % block.seq != 0)
      throw UsageError(
          fmt::format("--tokens is {}; with --preset it needs a multiple of --seq, {}", block.tokens, block.seq));
    report.memory = llama::gpu_memory(*model, {.rows = block.tokens / block.seq, .seq = block.seq});
  }
  if (!a.svg.empty()) train::write_file(a.svg, block_svg(block, report.rows));
  a.output.write(report);
  return 0;
}

}  // namespace

Command explain_command(CLI::App& coda) {
  CLI::App* app = coda.add_subcommand("explain", kHelp);
  const auto p = std::make_shared<ProgramArguments>();
  app->add_option("PROGRAM", p->program, "its name, with options as its type is spelled")->option_text(" ");
  app->add_option("--m", p->m, "rows of the product")->option_text("M");
  app->add_option("--n", p->n, "its columns")->option_text("N");
  app->add_option("--k", p->k, "its depth; without it the program runs over a stored matrix")->option_text("K");
  add_choice<std::optional<coda::detail::Form>>(
      *app, "--form", p->form,
      {{"TN", coda::detail::Form::TN}, {"NN", coda::detail::Form::NN}, {"NT", coda::detail::Form::NT}},
      "of a GPU's plans: x Wᵀ, dy W, dyᵀ x [all that are compiled]");
  p->output.add_machine(*app);
  p->output.add_json(*app);

  CLI::App* block = app->add_subcommand("block", kBlockHelp);
  const auto b = std::make_shared<BlockArguments>();
  explain::Block& o = b->block;
  block->add_option("--hidden", o.hidden, "width")->option_text("D (required, or --preset)");
  block->add_option("--ffn", o.ffn, "width of the MLP")->option_text("F (required, or --preset)");
  block->add_option("--tokens", o.tokens, "tokens of the pass")->option_text("M (required)")->required();
  const auto count = CLI::Range(int64_t{1}, (int64_t{1} << 31) - 1, "1 or more");
  const auto add = [&](const char* name, auto& field, const char* type, const char* text) {
    block->add_option(name, field, text)->option_text(type)->check(count);
  };
  add("--heads", o.heads, "H", "query heads [hidden / head-dim]");
  add("--kv-heads", o.kv_heads, "H", "key and value heads [heads / 4, or heads]");
  add("--head-dim", o.head_dim, "N", "width of a head [hidden / heads, or 128]");
  add("--seq", o.seq, "T", "tokens of a document, for attention [4096, or all]");
  add("--vocab", o.vocab, "V", "with the loss over a vocabulary of this size");
  add("--chunk", o.chunk, "T", "tokens whose logits exist at a time [64 MB of logits]");
  CLI::Option* preset =
      add_preset(*block, b->preset)->description("a layer of this model; says the memory of a GPU that trains it, too");
  for (const char* part : {"--hidden", "--ffn", "--heads", "--kv-heads", "--head-dim", "--vocab"})
    preset->excludes(block->get_option(part));
  add_dtype(*block, b->output.dtype, "of weights and activations");
  b->output.add_machine(*block);
  block->add_option("--svg", b->svg, "the layer as a picture, too")->option_text("FILE");
  b->output.add_json(*block);

  return {app, [p, b, block] { return block->parsed() ? run(*b) : run(*p); }};
}

}  // namespace coda::cli
