// coda eval: the loss of a model on a file, as one JSON object.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "coda/error.h"
#include "commands.h"
#include "llama/gpu.h"
#include "option.h"
#include "train/checkpoint.h"
#include "train/options.h"
#include "train/state.h"
#include "train/validation.h"

namespace coda::cli {
namespace {

constexpr const char* kHelp =
    "Prints the mean loss (cross-entropy, in nats a token) of a model on a text or on token ids, as one JSON "
    "object.\n\n"
    "  coda eval --model runs/play --data other.txt\n"
    "  coda eval --model DIR --data ids.bin --token-type u16 --seq 1024 --steps 100\n\n"
    "The data is cut into windows of --seq tokens, taken in order, each once. --steps N takes the first N batches "
    "only.";

struct Arguments {
  std::string model, data;
  train::TokenType token_type = train::TokenType::byte;
  std::optional<int64_t> document_separator;
  int64_t batch = 8, seq = 256;
  std::optional<int64_t> steps;
  train::DeviceKind device = train::DeviceKind::cpu;
  std::optional<llama::Dtype> dtype;
  int threads = 0;
};

int run(const Arguments& arguments) {
  const llama::Config config = train::read_model_config(arguments.model);
  if (arguments.seq > config.max_positions) {
    throw UsageError(fmt::format("--seq is {}, but the model has {} positions (max_position_embeddings)", arguments.seq,
                                 config.max_positions));
  }
  const train::TokenFile data(arguments.data, arguments.token_type, config.vocab);
  const train::Windows windows(data, 0, data.size(), arguments.seq);
  train::Evaluation evaluation{.rows = windows.count(),
                               .window = [&](int64_t row) { return row % windows.count(); },
                               .batch = arguments.batch,
                               .document_separator = std::nullopt,
                               .stop = {}};
  if (arguments.steps) evaluation.rows = *arguments.steps * arguments.batch;
  if (const auto separator = arguments.document_separator) {
    if (*separator < 0 || *separator >= config.vocab) {
      throw UsageError(fmt::format("--document-separator is {}, but the vocabulary is {}", *separator, config.vocab));
    }
    evaluation.document_separator = static_cast<int32_t>(*separator);
  }

  const bool on_gpu = arguments.device == train::DeviceKind::cuda;
  if (on_gpu && arguments.dtype == llama::Dtype::fp32)
    throw UsageError("--dtype is fp32; --device cuda computes in bf16");
  Cpu cpu(arguments.threads);
  const std::unique_ptr<llama::Model> model =
      on_gpu ? llama::make_model_on_gpu(config)
             : std::make_unique<llama::Model>(cpu, config, arguments.dtype.value_or(llama::Dtype::fp32));
  train::load_weights(arguments.model, *model);
  const std::optional<double> loss = [&] {
    try {
      return mean_loss(*model, windows, evaluation);
    } catch (const train::NotFinite& fault) {
      throw FileError(arguments.model, fault.what());
    }
  }();
  if (!loss) throw FileError(arguments.data, "no target counts, all of them follow --document-separator's token");
  const nlohmann::ordered_json result = {
      {"loss", *loss}, {"windows", evaluation.rows}, {"tokens", evaluation.rows * windows.seq()}};
  fmt::print("{}\n", result.dump());
  return 0;
}

}  // namespace

Command eval_command(CLI::App& coda) {
  CLI::App* app = coda.add_subcommand("eval", kHelp);
  const auto a = std::make_shared<Arguments>();
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 31, "1 or more");
  app->add_option("--model", a->model, "a folder in Hugging Face's layout")->option_text("DIR (required)")->required();
  app->add_option("--data", a->data, "text, or ids with --token-type")->option_text("FILE (required)")->required();
  add_token_type(*app, a->token_type);
  app->add_option("--document-separator", a->document_separator, "this token ends a document")->option_text("ID");
  show_default(app->add_option("--batch", a->batch, "rows at once")->option_text("B")->check(positive));
  show_default(app->add_option("--seq", a->seq, "tokens of a row")->option_text("T")->check(positive));
  app->add_option("--steps", a->steps, "batches to take [all]")->option_text("N")->check(positive);
  add_dtype(*app, a->dtype, "to compute in [fp32; on a GPU bf16]");
  add_device(*app, a->device, "where");
  show_default(app->add_option("--threads", a->threads, "0 for all")->option_text("N"));
  return {app, [a] { return run(*a); }};
}

}  // namespace coda::cli
