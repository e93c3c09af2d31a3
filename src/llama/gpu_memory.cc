#include "gpu_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "coda/loss.h"
#include "counted.h"
#include "hopper/attention_batch.h"
#include "hopper/plan.h"
#include "layer_rows.h"
#include "model_impl.h"

namespace coda::llama {

namespace {

double loss_bytes(const Config& config, int64_t tokens, bool backward) {
  return static_cast<double>(
      GpuLinearCrossEntropy::memory_bytes({.tokens = tokens, .vocab = config.vocab, .gradients = backward}));
}

/// The largest number from 1 to most for which fits is true, or 0; fits is true up to somewhere.
int64_t largest(int64_t most, const std::function<bool(int64_t)>& fits) {
  int64_t good = 0, bad = most + 1;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace

double sum(const std::vector<MemoryPiece>& pieces) {
  double bytes = 0;
  for (const MemoryPiece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

std::vector<MemoryPiece> gpu_model_memory(const Config& config) {
  const Parameters parameters(config);
  MemoryPiece masters{"parameters", 0}, gradients{"main gradients", 0}, moments{"AdamW's moments", 0};
  for (int i = 0; i < static_cast<int>(parameters.all().size()); ++i) {
    const GpuParameter<Counted> memory(parameters, i);
    masters.bytes += memory.master.bytes() + memory.weight.bytes();
    gradients.bytes += memory.gradient.bytes() + memory.folded_gradient.bytes();
    moments.bytes += memory.moment1.bytes() + memory.moment2.bytes();
  }
  return {masters, gradients, moments};
}

double gpu_pass_bytes(const Config& config, int64_t tokens, bool backward) {
  return pass_bytes<bf16>(config, tokens, backward) + loss_bytes(config, tokens, backward);
}

int64_t weight_gradient_workspace(const Config& config, int64_t tokens, int multiprocessors) {
  const std::pair<int64_t, int64_t> weights[] = {{config.qkv_width(), config.hidden},
                                                 {config.hidden, config.query_width()},
                                                 {2 * config.ffn, config.hidden},
                                                 {config.hidden, config.ffn}};
  int64_t bytes = 0;
  for (const auto& [rows, cols] : weights) {
    const int slices = hopper::best_slices({.form = coda::detail::Form::NT,
                                            .shape = {rows, cols, tokens},
                                            .epilogue_tiles = 1,
                                            .multiprocessors = multiprocessors});
    if (slices > 1) bytes = std::max(bytes, hopper::accumulator_bytes(rows, cols, slices));
  }
  return bytes;
}

GpuMemory gpu_memory(const Config& config, const GpuStep& step) {
  const int64_t m = step.tokens();
  const Pass<Counted, bf16> pass(config, m, true);
  const LayerTape<Counted, bf16>& tape = pass.tapes.front();
  const LayerWorkspace<Counted, bf16>& work = pass.workspace;
  // Weight gradients use the same memory after them.
  const int64_t scores =
      std::max(hopper::score_gradient_bytes(attention_shape(config), hopper::model_batch(step.rows, step.seq)),
               weight_gradient_workspace(config, m, hopper::kMultiprocessors));
  GpuMemory memory{.model = gpu_model_memory(config),
                   .layer = {{"h", pass.h.front().bytes()},
                             {"r", pass.inv_rms.front().bytes()},
                             {"qkv", tape.qkv.bytes()},
                             {"attention", tape.attention.bytes()},
                             {"log-sum-exp", tape.log_sum_exp.bytes()},
                             {"h_mid", tape.h_mid.bytes()},
                             {"r_mid", tape.inv_rms_mid.bytes()},
                             {"gate_up", tape.gate_up.bytes()}},
                   .layers = config.layers,
                   .pass = {{"h and r behind the last layer", pass.h.back().bytes() + pass.inv_rms.back().bytes()},
                            {"y, made again for each layer", work.y.bytes()},
                            {"gradients of one layer's activations", work.d_gate_up.bytes() + work.d_h_mid.bytes() +
                                                                         work.d_attention.bytes() + work.d_qkv.bytes() +
                                                                         pass.d_h.bytes()},
                            {"partial sums of rows", work.partial.bytes() + work.mean_dot.bytes()},
                            {fmt::format("the loss, {} tokens at a time", GpuLinearCrossEntropy::chunk_tokens(m)),
                             loss_bytes(config, m, true)},
                            {"gradients of attention's scores, for cuDNN", static_cast<double>(scores)}}};
  if (step.validates) memory.pass.push_back({"validation", gpu_pass_bytes(config, m, false)});
  return memory;
}

std::string gigabytes(double bytes) {
  return bytes < 1e11 ? fmt::format("{:.3g} GB", bytes / 1e9) : fmt::format("{:.0f} GB", bytes / 1e9);
}

std::string text_of(const std::vector<MemoryPiece>& pieces) {
  std::string text;
  for (const MemoryPiece& piece : pieces)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", piece.what, gigabytes(piece.bytes));
  return text;
}

std::optional<std::string> why_it_does_not_fit(const Config& config, const GpuStep& step, int64_t free, int64_t total) {
  const auto room = static_cast<double>(free);
  const GpuMemory memory = gpu_memory(config, step);
  if (memory.total() <= room) return std::nullopt;
  std::string fits =
      fmt::format("the parameters with gradients and moments alone take {}", gigabytes(sum(memory.model)));
  if (const int64_t rows = largest(step.rows - 1,
                                   [&](int64_t n) {
                                     return gpu_memory(config, {n, step.seq, step.validates}).total() <= room;
                                   });
      rows > 0) {
    fits = fmt::format("a batch of {} x {} would fit", rows, step.seq);
  } else if (const int64_t seq = largest(step.seq - 1,
                                         [&](int64_t n) {
                                           return gpu_memory(config, {1, n, step.validates}).total() <= room;
                                         });
             seq > 0) {
    fits = fmt::format("not one row of {} tokens would fit, but one of {}", step.seq, seq);
  }
  return fmt::format(
      "a batch of {} x {} tokens takes {} of the GPU's memory ({}, activations {}), which has {} free of {}; {}",
      step.rows, step.seq, gigabytes(memory.total()), text_of(memory.model), gigabytes(memory.activations()),
      gigabytes(room), gigabytes(static_cast<double>(total)), fits);
}

}  // namespace coda::llama
