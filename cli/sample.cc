// coda sample: what a model writes.
#include "train/sample.h"
#include "train/run.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <memory>

#include "coda/error.h"
#include "commands.h"
#include "option.h"
#include "train/checkpoint.h"
#include "train/state.h"

namespace coda::cli {
namespace {

constexpr const char* kHelp =
    "Prints a text and how a model goes on from it.\n\n"
    "  coda sample --model runs/play --prompt 'HAMLET.' --length 500\n"
    "  coda sample --model runs/play --prompt 'HAMLET.' --temperature 0       the likeliest byte, always\n"
    "  coda sample --model DIR --prompt '1 15043 3186'                        a vocabulary that is not bytes: ids\n\n"
    "A model with a vocabulary of 256 takes and prints text; bytes that a terminal cannot show are printed as \\xNN.\n"
    "Any other takes ids, separated by spaces or commas, and prints ids. The same seed gives the same text.";

struct Arguments {
  std::string model;
  std::optional<std::string> prompt;
  train::SampleOptions sampling;
  llama::Dtype dtype = llama::Dtype::fp32;
  int threads = 0;
};

std::vector<int32_t> parse_ids(const std::string& text, int64_t vocab) {
  std::vector<int32_t> ids;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    while (at != end && (*at == ' ' || *at == ',' || *at == '\n' || *at == '\t')) ++at;
    if (at == end) return ids;
    int32_t id = 0;
    const auto [stop, error] = std::from_chars(at, end, id);
    if (error != std::errc{} || (stop != end && *stop != ' ' && *stop != ',' && *stop != '\n' && *stop != '\t')) {
      throw UsageError(fmt::format(
          "--prompt is text, but the model's vocabulary is {}, not bytes: it takes ids, as in '1 15043 3186'", vocab));
    }
    ids.push_back(id);
    at = stop;
  }
}

int run(const Arguments& arguments) {
  const llama::Config config = train::read_model_config(arguments.model);
  const bool text = config.vocab == 256;
  std::vector<int32_t> tokens;
  if (text) {
    for (const char c : arguments.prompt.value_or("\n")) tokens.push_back(static_cast<unsigned char>(c));
  } else {
    tokens = parse_ids(arguments.prompt.value_or(""), config.vocab);
  }

  Cpu cpu(arguments.threads);
  llama::Model model(cpu, config, arguments.dtype);
  train::load_weights(arguments.model, model);
  train::SampleOptions sampling = arguments.sampling;
  // Past what it was trained on a model babbles.
  if (sampling.context == 0 && std::filesystem::exists(std::filesystem::path(arguments.model) / "run.json")) {
    sampling.context = train::read_run(arguments.model).options.seq;
  }
  const std::vector<int32_t> more = train::sample(model, tokens, sampling);
  tokens.insert(tokens.end(), more.begin(), more.end());
  fmt::print("{}\n", text ? train::printable(tokens) : fmt::format("{}", fmt::join(tokens, " ")));
  return 0;
}

}  // namespace

Command sample_command(CLI::App& coda) {
  CLI::App* app = coda.add_subcommand("sample", kHelp);
  const auto a = std::make_shared<Arguments>();
  app->add_option("--model", a->model, "a folder in Hugging Face's layout")->option_text("DIR (required)")->required();
  app->add_option("--prompt", a->prompt, "where to go on from [a new line]")->option_text("TEXT");
  show_default(app->add_option("--length", a->sampling.length, "tokens to add")->option_text("N"));
  show_default(
      app->add_option("--temperature", a->sampling.temperature, "0 takes the likeliest, 1 follows the model's chances")
          ->option_text("X"));
  app->add_option(
         "--context", a->sampling.context,
         "tokens that it sees at most, the later half again when that is full [--seq of its run, or all its positions]")
      ->option_text("N");
  show_default(app->add_option("--seed", a->sampling.seed, "of the chances")->option_text("S"));
  add_dtype(*app, a->dtype, "to compute in");
  show_default(app->add_option("--threads", a->threads, "0 for all")->option_text("N"));
  return {app, [a] { return run(*a); }};
}

}  // namespace coda::cli
