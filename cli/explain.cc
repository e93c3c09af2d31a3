// coda explain: what a program, or a Llama layer made of programs, reads, writes and computes.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "coda/error.h"
#include "commands.h"
#include "explain/picture.h"
#include "explain/report.h"
#include "option.h"
#include "train/durable_file.h"

namespace coda::cli {
namespace {

constexpr const char* kHelp =
    "Says what an epilogue program reads, writes and reduces, what its product costs fused and unfused, and how the "
    "CPU\n"
    "engine would run it; `coda explain block` the same of a Llama layer. Nothing is computed.\n\n"
    "  coda explain                                               the programs\n"
    "  coda explain RmsNormSwiGlu                                 its operands\n"
    "  coda explain 'RmsNormSwiGlu<bf16, DropGateUp>' --m 16384 --n 16384 --k 2048 --machine h200\n"
    "  coda explain block --hidden 2048 --ffn 8192 --tokens 16384 --machine this\n"
    "  coda explain block --help";

constexpr const char* kBlockHelp =
    "Every product of a Llama layer, forward and backward, and of the vocabulary loss with --vocab: its shape, its "
    "program,\n"
    "FLOPs and bytes, what is kept for the backward pass; the same layer unfused; and the ratio.\n\n"
    "  coda explain block --hidden 2048 --ffn 8192 --tokens 16384 --machine h200\n"
    "  coda explain block --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --tokens 8192 --vocab 128256 --svg "
    "layer.svg";

struct Output {
  std::string machine;
  std::optional<double> tflops, tbps;
  llama::Dtype dtype = llama::Dtype::bf16;
  std::string json;
  CLI::Option* json_option = nullptr;

  ElementType element() const { return dtype == llama::Dtype::bf16 ? ElementType::bfloat16 : ElementType::float32; }

  void add_machine(CLI::App& app) {
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
  Output output;
};

struct BlockArguments {
  explain::Block block;
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
  a.output.write(explain::ProgramReport{program, given, machine, cpu_plan(program, Cpu().threads())});
  return 0;
}

int run(const BlockArguments& a) {
  explain::Block block = a.block;
  block.element = a.output.element();
  block = completed(block);
  const auto machine = explain::machine(a.output.machine, a.output.tflops, a.output.tbps, block.element);
  const explain::BlockReport report{block, rows(block), machine};
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
  p->output.add_machine(*app);
  p->output.add_json(*app);

  CLI::App* block = app->add_subcommand("block", kBlockHelp);
  const auto b = std::make_shared<BlockArguments>();
  explain::Block& o = b->block;
  block->add_option("--hidden", o.hidden, "width")->option_text("D (required)")->required();
  block->add_option("--ffn", o.ffn, "width of the MLP")->option_text("F (required)")->required();
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
  add_dtype(*block, b->output.dtype, "of weights and activations");
  b->output.add_machine(*block);
  block->add_option("--svg", b->svg, "the layer as a picture, too")->option_text("FILE");
  b->output.add_json(*block);

  return {app, [p, b, block] { return block->parsed() ? run(*b) : run(*p); }};
}

}  // namespace coda::cli
