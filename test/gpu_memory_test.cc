// What training takes of a GPU's memory: counted as it is allocated, and what is said where it is too much. Needs no GPU.
#include "llama/gpu_memory.h"

#include <gtest/gtest.h>

#include "coda/loss.h"
#include "coda/programs/store.h"
#include "hopper/attention_batch.h"
#include "hopper/plan.h"
#include "llama/counted.h"
#include "llama/presets.h"

namespace coda::llama {
namespace {

Config preset(std::string_view name) {
  for (const Preset& one : kPresets)
    if (one.name == name) return one.config;
  ADD_FAILURE() << name;
  return {};
}

double piece(const std::vector<MemoryPiece>& pieces, const std::string& what) {
  for (const MemoryPiece& one : pieces)
    if (one.what == what) return one.bytes;
  ADD_FAILURE() << "no " << what;
  return 0;
}

// Worked out by hand: d 2048, 16 layers, 32 heads of 64 over 8, F 8192, V 128256, tied; M = 4 · 4096.
TEST(GpuMemory, IsThatOfAllThatIsAllocated) {
  constexpr double kM = 16384, kD = 2048, kF = 8192, kQkv = 3072, kV = 128256, kLayers = 16;
  const GpuMemory memory = gpu_memory(preset("llama-1b"), {.rows = 4, .seq = 4096});
  EXPECT_EQ(piece(memory.layer, "h"), kM * kD * 2);
  EXPECT_EQ(piece(memory.layer, "r"), kM * 4);
  EXPECT_EQ(piece(memory.layer, "qkv"), kM * kQkv * 2);
  EXPECT_EQ(piece(memory.layer, "attention"), kM * kD * 2);
  EXPECT_EQ(piece(memory.layer, "log-sum-exp"), kM * 32 * 4);
  EXPECT_EQ(piece(memory.layer, "h_mid"), kM * kD * 2);
  EXPECT_EQ(piece(memory.layer, "gate_up"), kM * 2 * kF * 2);
  EXPECT_EQ(memory.layers, 16);
  EXPECT_EQ(piece(memory.pass, "y, made again for each layer"), kM * kF * 2);
  EXPECT_EQ(piece(memory.pass, "gradients of one layer's activations"), kM * (2 * kF + kD + kD + kQkv + kD) * 2);
  EXPECT_EQ(piece(memory.pass, "the loss, 4096 tokens at a time"),
            static_cast<double>(GpuLinearCrossEntropy::memory_bytes({.tokens = 16384, .vocab = 128256})));
  // One document of 4096 at a time.
  EXPECT_EQ(piece(memory.pass, "gradients of attention's scores, for cuDNN"), 2.0 * 32 * 4096 * 4096);

  const double matrices = kLayers * (kQkv * kD + kD * kD + 3 * kF * kD), embedding = kV * kD, norms = 33 * kD;
  // Masters, and of every matrix what products read, the embedding's too as it is the vocabulary's.
  EXPECT_EQ(piece(memory.model, "parameters"), 4 * (matrices + embedding + norms) + 2 * (matrices + embedding));
  // The embedding's gradient comes from both of its uses.
  EXPECT_EQ(piece(memory.model, "main gradients"), 4 * (matrices + 2 * embedding + norms));
  EXPECT_EQ(piece(memory.model, "AdamW's moments"), 8 * (matrices + embedding + norms));
}

TEST(GpuMemory, IsWhatAPassTakes) {
  for (const bool backward : {false, true}) {
    const Config config{.layers = 3};
    EXPECT_EQ(gpu_pass_bytes(config, 1000, backward),
              pass_bytes<bf16>(config, 1000, backward) +
                  static_cast<double>(GpuLinearCrossEntropy::memory_bytes(
                      {.tokens = 1000, .vocab = config.vocab, .gradients = backward})));
  }
  // Per layer and once, but the scores: nothing is counted twice or left out.
  const Config config = preset("llama-1b");
  const GpuMemory memory = gpu_memory(config, {.rows = 2, .seq = 512});
  EXPECT_DOUBLE_EQ(memory.activations() - piece(memory.pass, "gradients of attention's scores, for cuDNN"),
                   gpu_pass_bytes(config, 1024, true));
  const GpuMemory validating = gpu_memory(config, {.rows = 2, .seq = 512, .validates = true});
  EXPECT_DOUBLE_EQ(validating.total() - memory.total(), gpu_pass_bytes(config, 1024, false));
}

TEST(GpuMemory, OfScoresIsWithinItsLimitWhereItCanBeDivided) {
  const AttentionShape shape{.heads = 32, .kv_heads = 8, .head_dim = 64};
  EXPECT_EQ(hopper::score_gradient_bytes(shape, hopper::model_batch(64, 512)), int64_t{2} * 32 * 512 * 512 * 64);
  EXPECT_EQ(hopper::backward_part(shape, hopper::model_batch(4, 4096)).documents, 1);
  // 4.3 GB a document: by heads.
  EXPECT_EQ(hopper::backward_part(shape, hopper::model_batch(1, 8192)).kv_heads, 2);
  EXPECT_EQ(hopper::score_gradient_bytes(shape, hopper::model_batch(1, 8192)), int64_t{2} * 8 * 8192 * 8192);
}

constexpr int64_t kH200 = int64_t{150'000'000'000};

TEST(GpuMemory, WhatFitsIsNotRefused) {
  EXPECT_EQ(why_it_does_not_fit(preset("llama-1b"), {.rows = 4, .seq = 4096}, kH200, kH200), std::nullopt);
}

TEST(GpuMemory, WhatDoesNotFitSaysWhatWould) {
  const Config config = preset("llama-1b");
  const GpuStep step{.rows = 64, .seq = 8192};
  const std::string said = why_it_does_not_fit(config, step, kH200, kH200 + 1'000'000'000).value_or("");
  EXPECT_EQ(said.find('\n'), std::string::npos);
  for (const char* part : {"a batch of 64 x 8192 tokens takes ", "parameters 7.41 GB", "main gradients 5.99 GB",
                           "AdamW's moments 9.89 GB", "activations ", "which has 150 GB free of 151 GB", "would fit"})
    EXPECT_NE(said.find(part), std::string::npos) << part << ": " << said;
  // What it says would fit does, and no more.
  const size_t at = said.find("a batch of ", 10);
  ASSERT_NE(at, std::string::npos) << said;
  const int64_t rows = std::stoll(said.substr(at + 11));
  EXPECT_GT(rows, 0);
  EXPECT_LE(gpu_memory(config, {rows, 8192}).total(), static_cast<double>(kH200));
  EXPECT_GT(gpu_memory(config, {rows + 1, 8192}).total(), static_cast<double>(kH200));
}

TEST(GpuMemory, SaysWhatWouldFitWhereNoRowDoes) {
  const Config config = preset("llama-8b");
  const double model = sum(gpu_model_memory(config));
  const auto said = [&](double free) {
    return why_it_does_not_fit(config, {.rows = 1, .seq = 8192}, static_cast<int64_t>(free), kH200).value_or("");
  };
  const std::string shorter = said(model + gpu_memory(config, {1, 3000}).activations());
  EXPECT_NE(shorter.find("not one row of 8192 tokens would fit, but one of 3000"), std::string::npos) << shorter;
  const std::string none = said(model);
  EXPECT_NE(none.find("the parameters with gradients and moments alone take 143 GB"), std::string::npos) << none;
}

/// The calls that layer_rows.h makes ask for no more than is reserved.
TEST(GpuMemory, IsReservedForTheSlicesThatCallsTake) {
  alignas(256) static float memory[64];
  for (const int64_t hidden : {128, 256, 512, 768, 1024, 1536, 2048})
    for (const int64_t tokens : {1, 100, 1024, 4096, 16384, 65536}) {
      const Config config{.vocab = 256,
                          .hidden = hidden,
                          .layers = 1,
                          .heads = hidden / 64,
                          .kv_heads = hidden / 128,
                          .head_dim = 64,
                          .ffn = hidden * 11 / 4 / 64 * 64};
      const int64_t reserved = weight_gradient_workspace(config, tokens, 132);
      const std::pair<int64_t, int64_t> weights[] = {
          {config.qkv_width(), hidden}, {hidden, config.query_width()}, {2 * config.ffn, hidden}, {hidden, config.ffn}};
      for (const auto& [rows, cols] : weights) {
        const auto* of_bf16 = reinterpret_cast<const bf16*>(memory);
        const auto a = coda::detail::factor(transpose(Matrix<const bf16>(of_bf16, tokens, rows))),
                   b = coda::detail::factor(transpose(Matrix<const bf16>(of_bf16, tokens, cols)));
        const Matrix<float> out(memory, rows, cols);
        const auto check = [&](const auto& program) {
          coda::detail::with_program(program, [&](const coda::detail::ProgramInfo& info) {
            const int slices = hopper::slices_of(a, {hopper::best_slices(hopper::problem_of(a, b, info, 132))});
            if (slices > 1) {
              EXPECT_LE(hopper::workspace_of(a, b, slices).bytes(), reserved)
                  << rows << " x " << cols << " x " << tokens;
            }
          });
        };
        check(Store<Tensors<bf16>, float>{.out = out});
        check(AccumulateInto<Tensors<bf16>>{.out = out});
      }
    }
}

TEST(GpuMemory, HasSlicesOfSmallWeightsGradients) {
  Config config = preset("llama-1b");
  EXPECT_EQ(weight_gradient_workspace(config, 16384, 132), 0);
  config.hidden = 1024;
  config.ffn = 2816;
  config.heads = config.kv_heads = 8;
  config.head_dim = 128;
  // Three slices of the largest that is cut, [1024, 2816].
  EXPECT_EQ(weight_gradient_workspace(config, 16384, 132), int64_t{3} * 1024 * 2816 * 4);
  EXPECT_EQ(weight_gradient_workspace(config, 64, 132), 0);
}

}  // namespace
}  // namespace coda::llama
