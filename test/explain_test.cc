// What `coda explain` says, held to numbers worked out by hand.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "coda/error.h"
#include "explain/block.h"
#include "explain/compiled.h"
#include "explain/picture.h"
#include "explain/report.h"
#include "explain/table.h"

namespace coda::explain {
namespace {

constexpr ElementType kBf16 = ElementType::bfloat16, kFloat = ElementType::float32;

void expect_bytes(const Kernel& kernel, int64_t read, int64_t written) {
  EXPECT_EQ(kernel.read, read) << kernel.name;
  EXPECT_EQ(kernel.written, written) << kernel.name;
}

template <class Call>
void expect_refused(Call call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ExplainProgram, IsFoundByItsSpelling) {
  EXPECT_EQ(find_program("RmsNormSwiGlu").spelling(), "RmsNormSwiGlu<bf16>");
  EXPECT_EQ(find_program("RmsNormSwiGlu<bf16, KeepGateUp>").spelling(), "RmsNormSwiGlu<bf16>");
  EXPECT_EQ(find_program("RmsNormSwiGlu<DropGateUp>").spelling(), "RmsNormSwiGlu<bf16, DropGateUp>");
  EXPECT_EQ(find_program("coda::RmsNormSwiGlu<coda::Tensors<float>, coda::DropGateUp>").spelling(),
            "RmsNormSwiGlu<float, DropGateUp>");
  EXPECT_EQ(find_program("RmsNormGlu<bf16, GegluTanh>").spelling(), "RmsNormGlu<bf16, GegluTanh>");
  EXPECT_EQ(find_program("Store<bf16, float>").spelling(), "Store<bf16, float>");
  EXPECT_EQ(find_program("Store<float>").spelling(), "Store<float>");
  EXPECT_EQ(find_program("RmsNormBackward<bf16, StreamEnds>").spelling(), "RmsNormBackward<bf16, StreamEnds>");
  for (const Program& program : programs()) EXPECT_EQ(&find_program(program.spelling()), &program);

  expect_refused([] { find_program("RmsNormSwigl"); }, "RmsNormBackward, FoldedWeightGradient, RmsNormSwiGlu");
  expect_refused([] { find_program("RmsNormSwiGlu<bf16, Keep>"); }, "RmsNormSwiGlu<bf16, DropGateUp>");
  expect_refused([] { find_program("RmsNormSwiGlu<bf16"); }, "RmsNormSwiGlu<bf16>");
  expect_refused([] { find_program("RmsNorm<bf16, KeepGateUp>"); }, "it needs one of RmsNorm<bf16>, RmsNorm<float>");
}

/// What is compiled can be explained: every CODA_PROGRAM line of src/kernels names a program (those of macros are not looked at), and
/// what is listed but not compiled does not link.
TEST(ExplainProgram, KnowsEveryProgramThatIsCompiled) {
  const char* root = std::getenv("CODA_SOURCE_DIR");
  ASSERT_NE(root, nullptr) << "ctest sets it";
  std::set<const Program*> found;
  for (const auto& file : std::filesystem::directory_iterator(std::filesystem::path(root) / "src" / "kernels")) {
    std::ifstream in(file.path());
    for (std::string line; std::getline(in, line);) {
      std::smatch match;
      if (std::regex_match(line, match, std::regex(R"(CODA_PROGRAM\((.*)\);)")))
        found.insert(&find_program(match.str(1)));
    }
  }
  EXPECT_GE(found.size(), 60u);
}

/// The list of what the GPU half compiles is read from every .cu file, and each of its programs can be explained.
TEST(ExplainGpuPlans, KnowEveryProgramThatIsCompiledForGpus) {
  const char* root = std::getenv("CODA_SOURCE_DIR");
  ASSERT_NE(root, nullptr) << "ctest sets it";
  size_t written = 0;
  for (const auto& file : std::filesystem::directory_iterator(std::filesystem::path(root) / "src" / "kernels")) {
    if (file.path().extension() != ".cu") continue;
    std::ifstream in(file.path());
    for (std::string line; std::getline(in, line);) written += line.starts_with("CODA_HOPPER_PROGRAM") ? 1 : 0;
  }
  EXPECT_EQ(compiled().size(), written) << "src/explain/compiled.cc includes every .cu file of src/kernels";
  std::set<const Program*> found;
  for (const Compiled& one : compiled()) found.insert(&find_program(one.name));
  EXPECT_EQ(found.size(), written);
}

const Card kH200 = *card_of("h200");

TEST(ExplainGpuPlans, AreTheEnginesCandidates) {
  const Sizes sizes{16384, 11264, 2048};
  const std::vector<GpuPlan> all = gpu_plans(find_program("RmsNormSwiGlu"), sizes, {}, kH200, {});
  ASSERT_EQ(all.size(), 1u);  // TN
  const GpuPlan& plan = all[0];
  EXPECT_EQ(plan.form, coda::detail::Form::TN);
  EXPECT_EQ(plan.shape, (hopper::Shape{16384, 11264, 2048}));
  EXPECT_EQ(plan.candidates.size(), 2 * std::size(hopper::kBands));  // of two tiles
  EXPECT_EQ(plan.chosen, 0u);
  EXPECT_FALSE(plan.tuned);
  EXPECT_EQ(plan.choice().reason, "");

  EXPECT_EQ(gpu_plans(find_program("Store"), sizes, {}, kH200, {}).size(), 3u);
  EXPECT_EQ(gpu_plans(find_program("Store"), sizes, coda::detail::Form::NN, kH200, {}).size(), 1u);
  EXPECT_EQ(gpu_plans(find_program("RopeBackward"), sizes, {}, kH200, {}).size(), 0u);  // a map
  EXPECT_FALSE(card_of("this"));
}

TEST(ExplainGpuPlans, SayWhatWasTuned) {
  hopper::TunedPlans tuned;
  tuned.put({.card = kH200.name,
             .program = "SwiGluBackward<Tensors<bf16>>",
             .form = coda::detail::Form::NN,
             .shape = {16384, 5632, 2048},
             .plan = {coda::detail::HopperTile::cooperative_128x256, 2}});
  const Program& program = find_program("SwiGluBackward");
  const GpuPlan plan = gpu_plans(program, {16384, 5632, 2048}, {}, kH200, tuned).at(0);
  EXPECT_TRUE(plan.tuned);
  EXPECT_EQ(plan.choice().kernel->tile, coda::detail::HopperTile::cooperative_128x256);
  EXPECT_EQ(plan.choice().band, 2);
  EXPECT_GT(plan.chosen, 0u);
  EXPECT_FALSE(gpu_plans(program, {16384, 5632, 2048}, {}, *card_of("h100"), tuned).at(0).tuned);

  const ProgramReport report{program, Sizes{16384, 5632, 2048}, {}, {}, kH200, {plan}};
  const std::string said = text(report);
  for (const char* part : {"plans of the GPU engine for 16384 × 5632 × 2048 NN (NVIDIA H200, 132 multiprocessors)",
                           "chosen: tuned", "its order's reads cost", "1.000"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said;
  const auto data = json(report);
  EXPECT_EQ(data["gpu_plans"][0]["tuned"], true);
  EXPECT_EQ(data["gpu_plans"][0]["chosen"], plan.chosen);
  EXPECT_EQ(data["gpu_plans"][0]["candidates"].size(), plan.candidates.size());
  const ProgramReport of_map{find_program("RopeBackward"), Sizes{64, 64, 64}, {}, {}, kH200, {}};
  EXPECT_NE(text(of_map).find("src/kernels compiles no such product of RopeBackward<bf16>"), std::string::npos);
}

TEST(ExplainGpuPlans, AreOfEveryProductOfABlock) {
  const Block b = completed({.tokens = 16384, .hidden = 2048, .ffn = 8192, .vocab = 128256, .chunk = 4096});
  BlockReport report{b, rows(b), {}, kH200, {}};
  report.gpu_plans = gpu_plans(b, report.rows, kH200, {});
  size_t products = 0;
  for (const Row& row : report.rows) products += row.step == Step::product ? 1 : 0;
  ASSERT_EQ(report.gpu_plans.size(), products) << "a product is not compiled in its form";
  for (const RowPlan& one : report.gpu_plans) {
    // Of the loss a chunk at a time.
    if (one.row == "F5") {
      EXPECT_EQ(one.plan.shape, (hopper::Shape{4096, 128256, 2048}));
    }
    if (one.row == "W lm") {
      EXPECT_EQ(one.plan.shape, (hopper::Shape{128256, 2048, 4096}));
      EXPECT_EQ(one.program, "Store<bf16, float>");
    }
  }
  const std::string said = text(report);
  EXPECT_NE(said.find("plans of the GPU engine (NVIDIA H200, 132 multiprocessors)"), std::string::npos);
  EXPECT_NE(said.find("4096 × 128256 × 2048"), std::string::npos);
  EXPECT_EQ(json(report)["gpu_plans"].size(), products);
}

TEST(ExplainMemory, NamesWhatAGpuKeeps) {
  llama::Config config{
      .vocab = 128256, .hidden = 2048, .layers = 16, .heads = 32, .kv_heads = 8, .head_dim = 64, .ffn = 8192};
  const Block b =
      completed({.tokens = 16384, .hidden = 2048, .ffn = 8192, .heads = 32, .kv_heads = 8, .vocab = 128256});
  BlockReport report{b, rows(b), {}, {}, {}, llama::gpu_memory(config, {.rows = 4, .seq = 4096})};
  const std::string said = text(report);
  for (const char* part : {"gate_up", "537 MB", "16 layers", "AdamW's moments", "attention's scores, for cuDNN"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said;
  // What a block keeps is what a GPU keeps of a layer: h, r, qkv, a, lse, h_mid, r_mid, gate_up.
  const auto data = json(report);
  int64_t layer = 0;
  for (const auto& [what, bytes] : data["gpu_memory"]["layer"].items()) layer += bytes.get<int64_t>();
  EXPECT_EQ(layer, data["totals"]["layer"]["kept"]);
  EXPECT_EQ(data["gpu_memory"]["kept_by_all_layers"], 16 * layer);
}

TEST(ExplainProgram, SaysWhatDescribeSays) {
  const Program& loss = find_program("CrossEntropy");
  EXPECT_EQ(loss.passes, 1);
  EXPECT_FALSE(loss.pairs);
  EXPECT_EQ(loss.col_group, 128);
  EXPECT_EQ(loss.row_group, 1);
  EXPECT_EQ(loss.fields[3].name, "group_max");
  EXPECT_EQ(loss.fields[3].direction, Direction::local);
  const Program& gamma = find_program("RmsNormBackward<bf16, StreamJoins, GammaInEpilogue>");
  EXPECT_EQ(gamma.row_group, 64);
  EXPECT_TRUE(find_program("RmsNormRope").pairs);
}

TEST(ExplainProgram, CountsBytesAndFlops) {
  // M = 16384 = 2^14, N = 2F = 2^14, K = 2^11: a and b are 2^26 bytes each in bf16, inv_rms is 2^16.
  const Sizes sizes{16384, 16384, 2048};
  const Program& swiglu = find_program("RmsNormSwiGlu");
  const Kernel one = fused(swiglu, sizes, kBf16);
  EXPECT_EQ(one.flops, int64_t{1} << 40);
  expect_bytes(one, (1 << 27) + (1 << 16), (int64_t{1} << 29) + (1 << 28));  // z [M, N], y [M, N/2]
  const std::vector<Kernel> two = separate_pass(swiglu, sizes, kBf16);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].flops, int64_t{1} << 40);
  expect_bytes(two[0], 1 << 27, 1 << 29);  // the accumulators, once
  expect_bytes(two[1], (1 << 29) + (1 << 16), (int64_t{1} << 29) + (1 << 28));
  EXPECT_EQ(two[1].flops, 0);
  expect_bytes(fused(find_program("RmsNormSwiGlu<bf16, DropGateUp>"), sizes, kBf16), (1 << 27) + (1 << 16), 1 << 28);
}

TEST(ExplainProgram, CountsEveryKindOfOperand) {
  // a [96, 7] and b [200, 7] in float: 8288 bytes. Two slots of 128 columns for 200.
  expect_bytes(fused(find_program("Residual<float>"), {96, 200, 7}, kFloat), 8288 + 76800, 76800 + 2 * 96 * 4);
  // gamma [200] is float; x is one tile more, bf16 here: factors 4144, tiles 38400.
  expect_bytes(fused(find_program("Residual<bf16, GammaInEpilogue>"), {96, 200, 7}, kBf16), 4144 + 38400 + 800,
               2 * 38400 + 2 * 96 * 4);
  // Two column slots of 64 rows, [2, 200] floats; inv_rms, mean_dot [96].
  expect_bytes(fused(find_program("RmsNormBackward<bf16, StreamEnds, GammaInEpilogue>"), {96, 200, 7}, kBf16),
               4144 + 2 * 384 + 38400 + 800, 38400 + 2 * 200 * 4);
  // DoubleTile [96, 400] in and out.
  expect_bytes(fused(find_program("SwiGluBackward"), {96, 200, 7}, kBf16), 4144 + 384 + 76800, 76800 + 38400 + 768);
  // MaxSum is 8 bytes, int32 labels 4; the local maximum stays on chip, the stored maxima are [2, 96].
  expect_bytes(fused(find_program("CrossEntropy"), {96, 200, 7}, kBf16), 4144 + 2 * 384,
               768 + 38400 + 2 * 96 * 8 + 768);
  // PerPair: at most a value per pair, [N/2].
  expect_bytes(fused(find_program("RmsNormRope"), {96, 32, 7}, kBf16), 2 * 7 * 128 + 2 * 384 + 2 * 64, 96 * 32 * 2);
  // What is added to is read too, in float whatever the factors are.
  expect_bytes(fused(find_program("AccumulateInto<float>"), {96, 200, 7}, kBf16), 4144 + 76800, 76800);
  // Over a stored matrix: no product.
  const Kernel map = fused(find_program("RopeBackward"), {96, 32, {}}, kBf16);
  EXPECT_EQ(map.flops, 0);
  expect_bytes(map, 6144 + 2 * 384 + 2 * 64 + 6144, 6144 + 384);
}

TEST(ExplainProgram, APlainStoreIsAProductWithoutFusion) {
  for (const char* name : {"Store", "AccumulateInto"}) {
    const auto parts = separate_pass(find_program(name), {96, 200, 7}, kBf16);
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].bytes(), fused(find_program(name), {96, 200, 7}, kBf16).bytes());
  }
  EXPECT_EQ(separate_pass(find_program("RmsNorm"), {96, 200, 7}, kBf16).size(), 2u);
  EXPECT_EQ(separate_pass(find_program("RopeBackward"), {96, 32, {}}, kBf16).size(), 1u);
}

TEST(ExplainProgram, RefusesSizesThatDoNotFit) {
  const Program& swiglu = find_program("RmsNormSwiGlu");
  expect_refused([&] { check(swiglu, {0, 16, 16}); }, "--m is 0; it needs 1 to 2147483647");
  expect_refused([&] { check(swiglu, {16, -16, 16}); }, "--n is -16");
  expect_refused([&] { check(swiglu, {16, 16, 0}); }, "--k is 0");
  expect_refused([&] { check(swiglu, {16, 100, 16}); }, "--n is 100; RmsNormSwiGlu needs a multiple of 16");
  expect_refused(
      [&] {
        check(find_program("SwiGluBackward"), {16, 100, 16});
      },
      "--n is 100; SwiGluBackward needs a multiple of 8");
  expect_refused([&] { check(swiglu, {1 << 30, 1 << 30, 1 << 30}); }, "below 2^60 FLOPs");
  check(find_program("Residual"), {1, 1, 1});
}

/// A small real layer: D = 2048, F = 5632, 16 heads and 4 key-value heads of 128, M = 16384, bf16.
Block layer() {
  return completed({.tokens = 16384, .hidden = 2048, .ffn = 5632});
}

const Row& row_of(const std::vector<Row>& rows, const std::string& name) {
  return *std::ranges::find(rows, name, &Row::name);
}

TEST(ExplainBlock, FillsInWhatALlamaHas) {
  const Block b = layer();
  EXPECT_EQ(b.heads, 16);
  EXPECT_EQ(b.kv_heads, 4);
  EXPECT_EQ(b.head_dim, 128);
  EXPECT_EQ(b.seq, 4096);
  const Block small = completed({.tokens = 100, .hidden = 2048, .ffn = 8192, .heads = 32, .kv_heads = 8});
  EXPECT_EQ(small.head_dim, 64);
  EXPECT_EQ(small.seq, 100);
}

TEST(ExplainBlock, ForwardIsWhatItIsByHand) {
  const std::vector<Row> all = rows(layer());
  // t = M·D·2 = 2^26 bytes is the stream; qkv is 1.5 t, y 2.75 t, z 5.5 t. Weights: qkv 12582912, o 8388608, gate_up
  // 46137344, down 23068672. A vector of tokens is 65536; a row sum of 16 slots is 1048576.
  constexpr int64_t t = 1 << 26;
  expect_bytes(row_of(all, "F4").fused, t + 12582912 + 2 * 65536 + 2 * 6144, t * 3 / 2);
  expect_bytes(row_of(all, "F1").fused, 2 * t + 8388608, t + 1048576);
  expect_bytes(row_of(all, "finish r_mid").fused, 1048576, 65536);
  expect_bytes(row_of(all, "F2").fused, t + 46137344 + 65536, t * 33 / 4);
  expect_bytes(row_of(all, "F3").fused, t * 11 / 4 + 23068672 + t, t + 1048576);

  const Totals forward = total(all, Part::layer_forward, {});
  EXPECT_EQ(forward.fused.read, 612577280);
  EXPECT_EQ(forward.fused.written, 790757376);
  // Per operator: norm (t, t), qkv, RoPE (1.25 t twice); o, add (2 t, t); norm, gate_up, SwiGLU (5.5 t, 2.75 t); down, add.
  EXPECT_EQ(forward.separate.read, 1331765248);
  EXPECT_EQ(forward.separate.written, 1140981760);
  // add + RMSNorm in one reads the sum no second time: 2 t less.
  EXPECT_EQ(forward.compiled.read, 1331765248 - 2 * t);
  EXPECT_EQ(forward.compiled.written, 1140981760);
  EXPECT_NEAR(static_cast<double>(forward.separate.bytes()) / static_cast<double>(forward.fused.bytes()), 1.762, 5e-4);
  EXPECT_NEAR(static_cast<double>(forward.compiled.bytes()) / static_cast<double>(forward.fused.bytes()), 1.666, 5e-4);
  // Kept (the layer's input among it): h, r, qkv, a, lse, h_mid, r_mid, z. Unfused also the two normalised inputs, and y.
  EXPECT_EQ(forward.kept, 3 * t + t * 3 / 2 + t * 11 / 2 + 2 * 65536 + 16 * 65536);
  EXPECT_EQ(forward.kept_separate - forward.kept, 2 * t + t * 11 / 4);
}

TEST(ExplainBlock, BackwardIsWhatItIsByHand) {
  const std::vector<Row> all = rows(layer());
  constexpr int64_t t = 1 << 26;
  // dot_z has 44 slots for F = 5632, dot of qkv 24 for 3072.
  expect_bytes(row_of(all, "B3").fused, t + 23068672 + 65536 + t * 11 / 2, t * 33 / 4 + 44 * 65536);
  expect_bytes(row_of(all, "finish s_mid").fused, 44 * 65536, 65536);
  expect_bytes(row_of(all, "B2").fused, t * 11 / 2 + 46137344 + 2 * 65536 + 2 * t, t);
  expect_bytes(row_of(all, "B1").fused, t + 8388608, t);
  expect_bytes(row_of(all, "B4").fused, 3 * t + 2 * 65536 + 2 * 6144, t * 3 / 2 + 24 * 65536);
  expect_bytes(row_of(all, "B4 product").fused, t * 3 / 2 + 12582912 + 2 * 65536 + 2 * t, t);
  // Weight gradients are float, twice a bf16 weight.
  expect_bytes(row_of(all, "W down").fused, t + t * 11 / 4, 2 * 23068672);
  expect_bytes(row_of(all, "W gate_up").fused, t * 11 / 2 + t, 2 * 46137344);
  // GEMM, RMSNorm's derivative (2 t and r and gamma; t and d_gamma), add (2 t, t); the latter two in one save a t each way.
  const Row& b2 = row_of(all, "B2");
  ASSERT_EQ(b2.separate.size(), 3u);
  expect_bytes(b2.separate[1], 2 * t + 65536 + 4096, t + 4096);
  ASSERT_EQ(b2.compiled.size(), 2u);
  EXPECT_EQ(b2.separate[1].bytes() + b2.separate[2].bytes() - b2.compiled[1].bytes(), 2 * t);
}

TEST(ExplainBlock, FlopsAreSixPerTokenAndWeight) {
  for (const std::optional<int64_t> vocab : {std::optional<int64_t>{}, std::optional<int64_t>{32000}}) {
    const Block b =
        completed({.tokens = 4096, .hidden = 4096, .ffn = 14336, .heads = 32, .kv_heads = 8, .vocab = vocab});
    // 4096 · (6144 + 4096 + 3 · 14336) weights of the layer, and the vocabulary's.
    const int64_t weights = 218103808 + (vocab ? 131072000 : 0);
    EXPECT_EQ(b.product_weights(), weights);
    const std::vector<Row> all = rows(b);
    const Totals both = total(all, Part::layer, {});
    const Totals loss = total(all, Part::loss, {});
    EXPECT_EQ(loss.fused.flops, vocab ? int64_t{6} * 4096 * 131072000 : 0);
    EXPECT_EQ(both.fused.flops + loss.fused.flops, 6 * 4096 * weights);
    EXPECT_EQ(both.separate.flops + loss.separate.flops, 6 * 4096 * weights);
    EXPECT_EQ(both.compiled.flops + loss.compiled.flops, 6 * 4096 * weights);
    EXPECT_EQ(total(all, Part::layer_forward, {}).fused.flops, int64_t{2} * 4096 * 218103808);
    // Causal attention over all 4096: 2 forward and 5 backward half products of M · seq · query width.
    EXPECT_EQ(total(all, Part::attention, {}).fused.flops, int64_t{7} * 4096 * 4096 * 4096);
  }
}

TEST(ExplainBlock, TheLossReadsItsWeightForEveryChunk) {
  Block b{.tokens = 1024, .hidden = 512, .ffn = 1024, .vocab = 32000, .chunk = 256};
  const std::vector<Row> four = rows(completed(b));
  b.chunk = 1024;
  const std::vector<Row> one = rows(completed(b));
  constexpr int64_t kWeight = int64_t{32000} * 512;
  EXPECT_EQ(row_of(four, "F5").fused.read - row_of(one, "F5").fused.read, 3 * 2 * kWeight);
  EXPECT_EQ(row_of(four, "B5 product").fused.read - row_of(one, "B5 product").fused.read, 3 * 2 * kWeight);
  EXPECT_EQ(row_of(four, "W lm").fused.read - row_of(one, "W lm").fused.read, 3 * 4 * kWeight);
  EXPECT_EQ(row_of(four, "W lm").fused.written, 4 * 4 * kWeight);
  // F5 in one chunk: h [1024, 512], the weight, r and labels; maxima, label_logit and (max, sum) of 250 slots, the logits.
  expect_bytes(row_of(one, "F5").fused, 1048576 + 2 * kWeight + 2 * 4096, 65536000 + 250 * 1024 * (4 + 4 + 8));
  // In one chunk the fused loss is what it saves: one reading of the logits by the cross-entropy.
  EXPECT_LT(row_of(one, "F5").fused.bytes(),
            row_of(one, "F5").separate[1].bytes() + row_of(one, "F5").separate[2].bytes());
}

TEST(ExplainBlock, RefusesWhatIsNoLlama) {
  const auto refused = [](const Block& b, const std::string& part) { expect_refused([&] { completed(b); }, part); };
  refused({.tokens = 0, .hidden = 64, .ffn = 64}, "--tokens is 0");
  refused({.tokens = 64, .hidden = -64, .ffn = 64}, "--hidden is -64");
  refused({.tokens = 64, .hidden = 64, .ffn = 0}, "--ffn is 0");
  refused({.tokens = 64, .hidden = 64, .ffn = 60}, "--ffn is 60; it needs a multiple of 8");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .heads = 3}, "--hidden is 64; it needs a multiple of 3");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .heads = 4, .kv_heads = 3}, "--heads is 4; it needs a multiple of 3");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .head_dim = 24}, "--hidden is 64; it needs a multiple of 24");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .heads = 2, .head_dim = 24},
          "--head-dim is 24; it needs a multiple of 16");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .vocab = 0}, "--vocab is 0");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .seq = 128}, "--seq is 128");
  refused({.tokens = 64, .hidden = 64, .ffn = 64, .chunk = 16}, "--vocab");
  refused({.tokens = 1 << 30, .hidden = 1 << 30, .ffn = 1 << 30}, "below 2^60 FLOPs");
}

TEST(ExplainMachine, TakesTheSlowerOfProductAndMemory) {
  const Machine machine{.flops_per_second = 100, .bytes_per_second = 10};
  EXPECT_EQ(machine.seconds(Kernel{"", 1000, 30, 20}), 10);  // 10 s of product, 5 s of memory
  EXPECT_EQ(machine.seconds(Kernel{"", 100, 30, 20}), 5);
  const Kernel both[] = {{"", 1000, 30, 20}, {"", 0, 30, 20}};
  EXPECT_EQ(machine.seconds(both), 15);
  const std::vector<Row> all = rows(layer());
  const Totals totals = total(all, Part::layer, preset("h200", kBf16));
  EXPECT_GT(totals.separate.seconds, totals.compiled.seconds);
  EXPECT_GT(totals.compiled.seconds, totals.fused.seconds);
}

TEST(ExplainMachine, RatesAreGivenMeasuredOrOfADataSheet) {
  EXPECT_FALSE(machine("", {}, {}, kBf16));
  EXPECT_EQ(machine("h100", {}, {}, kBf16)->bytes_per_second, 3.35e12);
  EXPECT_EQ(machine("h200", {}, {}, kBf16)->flops_per_second, 989e12);
  const auto sustained = machine("h200", 600, {}, kBf16);
  EXPECT_EQ(sustained->flops_per_second, 600e12);
  EXPECT_EQ(sustained->bytes_per_second, 4.8e12);
  EXPECT_EQ(machine("h200", 60, {}, kFloat)->flops_per_second, 60e12);
  EXPECT_EQ(machine("", 2, 0.5, kFloat)->bytes_per_second, 0.5e12);
  expect_refused([] { machine("h300", {}, {}, kBf16); }, "--machine is h300; it needs h100, h200 or this");
  expect_refused([] { machine("h200", {}, {}, kFloat); }, "--tflops");
  expect_refused([] { machine("", 100, {}, kBf16); }, "--tbps");
  expect_refused([] { machine("", {}, 1, kBf16); }, "--tflops");
  expect_refused([] { machine("h200", -1, {}, kBf16); }, "--tflops is -1");
  const auto here = machine("this", {}, {}, kFloat);
  EXPECT_GT(here->flops_per_second, 1e8);
  EXPECT_GT(here->bytes_per_second, 1e8);
}

TEST(ExplainReport, SaysRowsAndTotals) {
  Block b{.tokens = 16384, .hidden = 2048, .ffn = 5632, .vocab = 32000};
  b = completed(b);
  const BlockReport report{b, rows(b), preset("h200", kBf16)};
  const std::string said = text(report);
  for (const Row& row : report.rows) EXPECT_NE(said.find("\n" + row.name + "  "), std::string::npos) << row.name;
  for (const char* part :
       {"TN", "NN", "NT", "16384 × 3072 × 2048", "RmsNormRope<bf16>", "layer, forward", "989 TFLOP/s", "4.80 TB/s",
        "sustained rates are lower", "max(FLOPs / rate, bytes / bandwidth)"}) {
    EXPECT_NE(said.find(part), std::string::npos) << part;
  }
  const nlohmann::ordered_json data = json(report);
  EXPECT_EQ(data["rows"].size(), report.rows.size());
  EXPECT_EQ(data["totals"]["loss"]["fused"]["flops"], int64_t{6} * 16384 * 32000 * 2048);

  const Program& p = find_program("CrossEntropy");
  const ProgramReport one{p, Sizes{64, 256, 32}, {}, cpu_plan(p, 2)};
  const std::string program = text(one);
  for (const char* part :
       {"group_max", "reduced on chip", "RowLogSumExp<128>", "[⌈N/128⌉, M]", "[2, 64]", "a measure pass",
        "groups of 128 columns", "plan of the CPU engine", "rows of a block", "unfused"}) {
    EXPECT_NE(program.find(part), std::string::npos) << part << "\n" << program;
  }
  EXPECT_EQ(json(one)["operands"][3]["bytes"], 0);
  EXPECT_EQ(json(one)["k"], 32);
}

TEST(ExplainReport, NumbersHaveThreeDigits) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(67108864), "67.1 MB");
  EXPECT_EQ(bytes_text(999999), "1.00 MB");
  EXPECT_EQ(flops_text(int64_t{1} << 40), "1.10 TFLOP");
  EXPECT_EQ(time_text(5.56e-4), "556 µs");
  EXPECT_EQ(table({{"a", "W̃", "c"}, {"bb", "x", "dd"}}, "llr"), "a   W̃   c\nbb  x  dd\n");
}

/// Tags that open and close in order, attributes in quotes, no bare & or <.
void expect_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag(R"(^<(/?)([a-zA-Z]+)((?: [a-zA-Z-]+="[^"<]*")*) ?(/?)>)");
  for (size_t i = 0; i < svg.size();) {
    if (svg[i] == '<') {
      std::smatch match;
      const std::string rest = svg.substr(i, std::min<size_t>(svg.size() - i, 600));
      ASSERT_TRUE(std::regex_search(rest, match, tag)) << rest.substr(0, 80);
      if (match.length(1) > 0) {
        ASSERT_FALSE(open.empty());
        ASSERT_EQ(open.back(), match.str(2));
        open.pop_back();
      } else if (match.length(4) == 0) {
        open.push_back(match.str(2));
      }
      i += static_cast<size_t>(match.length(0));
    } else {
      const std::string entity = svg.substr(i, svg[i] == '&' ? svg.find(';', i) - i + 1 : 0);
      ASSERT_TRUE(entity.empty() || entity == "&lt;" || entity == "&gt;" || entity == "&amp;") << entity;
      ASSERT_NE(svg[i], '>');
      ++i;
    }
  }
  EXPECT_TRUE(open.empty());
}

TEST(ExplainPicture, HasEveryRowAndIsWellFormed) {
  for (const std::optional<int64_t> vocab : {std::optional<int64_t>{}, std::optional<int64_t>{128256}}) {
    const Block b =
        completed({.tokens = 8192, .hidden = 4096, .ffn = 14336, .heads = 32, .kv_heads = 8, .vocab = vocab});
    const std::vector<Row> all = rows(b);
    const std::string svg = block_svg(b, all);
    expect_well_formed(svg);
    for (const Row& row : all) EXPECT_NE(svg.find(">" + row.name + "<"), std::string::npos) << row.name;
    for (const char* part : {"8192×6144×4096", "TN  ", "[8192, 28672]", "residual stream", "fill=\"#ffffff\""})
      EXPECT_NE(svg.find(part), std::string::npos) << part;
    EXPECT_EQ(svg.find("cross-entropy") == std::string::npos && svg.find("CrossEntropy") == std::string::npos, !vocab);
  }
}

}  // namespace
}  // namespace coda::explain
