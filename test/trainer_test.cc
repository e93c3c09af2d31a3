#include "train/trainer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "coda/error.h"
#include "train/checkpoint.h"
#include "train/safetensors.h"
#include "train/sample.h"
#include "train/state.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using Start = Trainer::Start;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string contents(const fs::path& path) {
  std::stringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  return all.str();
}

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("coda_trainer_test_" + std::to_string(getpid()));
    fs::remove_all(dir_);
    fs::create_directory(dir_);
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 300; ++i) text << "line " << i * i % 37 << " of a text\n";
  }
  void TearDown() override { fs::remove_all(dir_); }

  Options options(llama::Dtype dtype = llama::Dtype::fp32) const {
    Options o;
    o.data = (dir_ / "text").string();
    o.hidden = 32;
    o.layers = 1;
    o.heads = 2;
    o.kv_heads = 1;
    o.head_dim = 16;
    o.ffn = 32;
    o.steps = 12;
    o.batch = 2;
    o.seq = 16;
    o.accumulate = 2;
    o.lr = 1e-2;
    o.warmup = 3;
    o.eval_every = 4;
    o.dtype = dtype;
    return o;
  }

  /// Trains until a step, as if Ctrl-C came there; 0 for to the end.
  Outcome train(const Options& o, const std::string& name, Start start, int64_t until = 0) {
    Trainer trainer(cpu_, dir_ / name, o, start);
    return trainer.run(progress_, [&] { return until > 0 && trainer.step() >= until ? 2 : 0; });
  }

  /// What a run computed: tokens_per_s is of the clock.
  std::string computed(const std::string& name) const {
    std::istringstream lines(contents(dir_ / name / "metrics.jsonl"));
    std::string out, line;
    while (std::getline(lines, line)) {
      auto object = nlohmann::json::parse(line);
      object.erase("tokens_per_s");
      out += object.dump() + "\n";
    }
    return out;
  }
  void expect_same_run(const std::string& a, const std::string& b) const {
    EXPECT_EQ(computed(a), computed(b));
    for (const char* file : {"model.safetensors", "optimizer-12.safetensors", "config.json"}) {
      EXPECT_TRUE(contents(dir_ / a / file) == contents(dir_ / b / file)) << file;
    }
  }

  fs::path dir_;
  std::ostringstream out_;
  Progress progress_{out_, false};
  Cpu cpu_{1};  // results do not depend on it, and on a busy machine a test with one thread is sooner done
};

TEST_F(TrainerTest, AResumedRunIsTheUninterruptedOneBitForBit) {
  for (const auto dtype : {llama::Dtype::fp32, llama::Dtype::bf16}) {
    const std::string kind = dtype == llama::Dtype::fp32 ? "fp32-" : "bf16-";
    const Outcome whole = train(options(dtype), kind + "whole", Start::fresh);
    EXPECT_EQ(whole.step, 12);
    EXPECT_EQ(whole.signal, 0);
    EXPECT_TRUE(whole.valid_loss.has_value());
    const Outcome stopped = train(options(dtype), kind + "parts", Start::fresh, 5);
    EXPECT_EQ(stopped.step, 5);
    EXPECT_EQ(stopped.signal, 2);
    train(options(dtype), kind + "parts", Start::resume, 6);
    train(options(dtype), kind + "parts", Start::resume);
    expect_same_run(kind + "whole", kind + "parts");
  }
}

TEST_F(TrainerTest, StepsAreTheTotal) {
  train(options(), "whole", Start::fresh);
  Options o = options();
  o.steps = 8;
  train(o, "longer", Start::fresh);
  o.steps = 12;
  train(o, "longer", Start::resume);
  expect_same_run("whole", "longer");
  o.steps = 11;
  EXPECT_THROW(train(o, "longer", Start::resume), UsageError);
}

TEST_F(TrainerTest, ACrashAtAnyMomentOfASaveIsSurvived) {
  train(options(), "whole", Start::fresh);
  train(options(), "parts", Start::fresh, 5);
  const fs::path run = dir_ / "parts";
  // Three steps went on, the next save got as far as its optimizer's file and half a model, and then the power failed.
  std::ofstream(run / "optimizer-8.safetensors") << "written, but not committed";
  std::ofstream(run / "optimizer-9.safetensors.partial") << "torn";
  std::ofstream(run / "model.safetensors.partial") << "torn";
  std::ofstream(run / "metrics.jsonl", std::ios::app) << R"({"step":5,"loss":1,"grad_norm":1,"tokens_per_s":1,"lr":1})"
                                                      << "\n{\"step\":6,\"lo";
  train(options(), "parts", Start::resume);
  expect_same_run("whole", "parts");
  for (const auto& entry : fs::directory_iterator(run)) {
    const std::string name = entry.path().filename().string();
    EXPECT_FALSE(name.ends_with(".partial") || name == "optimizer-8.safetensors" || name == "optimizer-5.safetensors")
        << name;
  }
}

TEST_F(TrainerTest, ARunThatNeverSavedBeginsAgain) {
  train(options(), "whole", Start::fresh);
  { const Trainer trainer(cpu_, dir_ / "parts", options(), Start::fresh); }
  train(options(), "parts", Start::resume);
  expect_same_run("whole", "parts");
}

TEST_F(TrainerTest, OlderCheckpointsAreKeptWhole) {
  Options o = options();
  o.save_every = 3;
  o.keep = 3;
  train(o, "run", Start::fresh);
  const fs::path run = dir_ / "run";
  EXPECT_FALSE(fs::exists(run / "step-3"));
  EXPECT_FALSE(fs::exists(run / "step-12"));
  for (const int64_t step : {6, 9}) EXPECT_EQ(saved_step(run / fmt::format("step-{}", step)), step);
  EXPECT_EQ(saved_step(run), 12);
  // One of them goes on as a run of its own, to the same end.
  train(o, "run/step-6", Start::resume);
  EXPECT_TRUE(contents(run / "step-6" / "model.safetensors") == contents(run / "model.safetensors"));
}

TEST_F(TrainerTest, ChangedDataAndRunsThatAreThereAreRefused) {
  train(options(), "run", Start::fresh, 2);
  const std::string model = contents(dir_ / "run" / "model.safetensors");
  EXPECT_THROW(train(options(), "run", Start::fresh), UsageError);
  std::ofstream(dir_ / "text", std::ios::app) << "more";
  EXPECT_THROW(train(options(), "run", Start::resume), FileError);
  EXPECT_TRUE(contents(dir_ / "run" / "model.safetensors") == model);
}

TEST_F(TrainerTest, ALossThatIsNotFiniteStopsAndNamesTheStep) {
  train(options(), "run", Start::fresh, 4);
  const std::string model = contents(dir_ / "run" / "model.safetensors");
  // Weights that are not numbers, as a run that diverged has them. The file begins with its header and its header's length.
  const fs::path state = dir_ / "run" / "optimizer-4.safetensors";
  std::string bytes = contents(state);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  for (size_t i = sizeof(header) + header; i < bytes.size(); ++i) bytes[i] = '\xff';
  std::ofstream(state, std::ios::binary) << bytes;
  try {
    train(options(), "run", Start::resume);
    FAIL() << "a NaN was trained on";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(),
                         "step 4: the loss is nan; the first value that is not finite is in the weight "
                         "model.embed_tokens.weight, row 0, column 0 (nan)"))
        << error.what();
    EXPECT_TRUE(contains(error.what(), "the checkpoint of step 4 in")) << error.what();
  }
  EXPECT_TRUE(contents(dir_ / "run" / "model.safetensors") == model);
}

TEST_F(TrainerTest, OneWeightThatIsNotFiniteIsNamed) {
  for (const float poison : {std::nanf(""), INFINITY}) {
    fs::remove_all(dir_ / "run");
    train(options(), "run", Start::fresh, 4);
    const fs::path state = dir_ / "run" / "optimizer-4.safetensors";
    const int64_t begin = SafetensorsFile(state).tensors().at("master/layers.0.down").begin;
    std::string bytes = contents(state);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    std::memcpy(bytes.data() + sizeof(header) + header + begin + (3 * 32 + 5) * 4, &poison, sizeof(poison));
    std::ofstream(state, std::ios::binary) << bytes;
    const std::string model = contents(dir_ / "run" / "model.safetensors");
    const std::string message = message_of([&] { train(options(), "run", Start::resume); });
    EXPECT_TRUE(contains(message, "step 4: the loss is nan; ")) << message;
    EXPECT_TRUE(contains(message, std::string("in the weight model.layers.0.mlp.down_proj.weight, row 3, column 5 (") +
                                      (std::isnan(poison) ? "nan)" : "inf)")))
        << message;
    EXPECT_TRUE(contents(dir_ / "run" / "model.safetensors") == model);
  }
}

TEST_F(TrainerTest, ALearningRateThatOverflowsStopsBeforeASave) {
  Options o = options();
  o.warmup = 0;
  o.holdout = 0;
  o.lr = 1e30;
  std::string message = message_of([&] { train(o, "run", Start::fresh); });
  EXPECT_TRUE(
      contains(message, "step 1: the loss is nan; the first value that is not finite is in layer 0, qkv, row 0"))
      << message;
  EXPECT_TRUE(contains(message, "nothing is saved")) << message;
  // A weight can overflow in an update whose gradient was finite.
  o.lr = 3e38;
  o.save_every = 1;
  message = message_of([&] { train(o, "saved", Start::fresh); });
  EXPECT_TRUE(contains(message, "step 1: the update made a value that is not finite, in the weight ")) << message;
  EXPECT_FALSE(fs::exists(dir_ / "saved" / "model.safetensors"));
}

TEST_F(TrainerTest, AStepWithoutATargetThatCountsSaysSo) {
  std::ofstream(dir_ / "text") << std::string(400, '.');
  Options o = options();
  o.document_separator = '.';
  o.holdout = 0.25;
  const Outcome outcome = train(o, "run", Start::fresh);
  EXPECT_EQ(outcome.step, 12);
  EXPECT_EQ(outcome.valid_loss, std::nullopt);
  EXPECT_TRUE(contains(out_.str(), "step 3: no target counts")) << out_.str();
  EXPECT_EQ(nlohmann::json::parse(computed("run").substr(0, computed("run").find('\n'))).at("grad_norm"), 0);
}

TEST_F(TrainerTest, AnOptimizersFileOfAnotherStepIsRefused) {
  train(options(), "whole", Start::fresh);
  train(options(), "parts", Start::fresh, 5);
  fs::copy_file(dir_ / "whole" / "optimizer-12.safetensors", dir_ / "parts" / "optimizer-5.safetensors",
                fs::copy_options::overwrite_existing);
  const std::string message = message_of([&] { train(options(), "parts", Start::resume); });
  EXPECT_TRUE(contains(message, "optimizer-5.safetensors: does not say that it is of step 5")) << message;
}

TEST_F(TrainerTest, AConfigThatAsksForMoreThanTheWeightsIsRefused) {
  train(options(), "run", Start::fresh, 2);
  const fs::path config = dir_ / "run" / "config.json";
  auto object = nlohmann::json::parse(contents(config));
  object["num_hidden_layers"] = 2'000'000'000;
  object["intermediate_size"] = 1 << 20;
  std::ofstream(config) << object;
  const std::string message = message_of([&] { read_model_config(dir_ / "run"); });
  EXPECT_TRUE(contains(message, "model.safetensors: has ")) << message;
  EXPECT_TRUE(contains(message, "but config.json asks for a model of")) << message;
  EXPECT_THROW(train(options(), "run", Start::resume), FileError);
}

/// Nothing is divided by the number of targets that count where there are none.
TEST_F(TrainerTest, MicroBatchesAndStepsWithoutATargetThatCounts) {
  const auto losses = [&](const std::string& text, const std::string& name) {
    std::ofstream(dir_ / "separated") << text;
    Options o = options();
    o.data = (dir_ / "separated").string();
    o.document_separator = '\n';
    o.in_order = true;
    o.batch = 1;
    o.accumulate = 2;
    o.steps = 2;
    o.lr = 0;
    train(o, name, Start::fresh);
    std::vector<double> values;
    std::istringstream lines(computed(name));
    for (std::string line; std::getline(lines, line);)
      values.push_back(nlohmann::json::parse(line).at("loss").get<double>());
    return values;
  };
  const std::string separators(16, '\n');
  // Every other window of 16 is separators only: a step's mean is over the other window's 16 tokens, near log 256.
  std::string every_other;
  for (int i = 0; i < 3; ++i) every_other += separators + "sixteen letters.";
  for (const double loss : losses(every_other, "half")) EXPECT_NEAR(loss, std::log(256), 0.3);
  EXPECT_EQ(losses(separators + separators + separators + separators + "\n", "none"), (std::vector<double>{0, 0}));
}

TEST_F(TrainerTest, InitTakesAnotherRunsWeights) {
  train(options(), "run", Start::fresh);
  Options o = options();
  o.init = (dir_ / "run").string();
  o.hidden = 999;  // the checkpoint's shape counts
  Trainer trainer(cpu_, dir_ / "on", o, Start::fresh);
  EXPECT_EQ(trainer.model().config().hidden, 32);
  EXPECT_EQ(trainer.step(), 0);
  std::vector<float> ours(256 * 32), theirs(256 * 32);
  const std::vector<int64_t> shape = {256, 32};
  trainer.model().get_tensor("model.embed_tokens.weight", ours);
  CheckpointReader(dir_ / "run").read("model.embed_tokens.weight", shape, theirs);
  EXPECT_EQ(ours, theirs);
  o.seq = 4096;
  EXPECT_THROW(Trainer(cpu_, dir_ / "long", o, Start::fresh), UsageError);
  EXPECT_FALSE(fs::exists(dir_ / "long"));
}

TEST_F(TrainerTest, TheLossFallsAndTheLastValidationIsTheEvaluationOfTheCheckpoint) {
  Options o = options();
  o.steps = 60;
  o.warmup = 0;
  o.holdout = 0.1;
  double valid_loss = 0;
  {
    Trainer trainer(cpu_, dir_ / "run", o, Start::fresh);
    valid_loss = trainer.run(progress_, [] { return 0; }).valid_loss.value();
  }
  EXPECT_LT(valid_loss, 3.5);
  llama::Model model(cpu_, read_config(dir_ / "run"), llama::Dtype::fp32);
  load_weights(dir_ / "run", model);
  const TokenFile data(o.data, TokenType::byte, 256);
  const int64_t split = holdout_start(data.size(), 0.1);
  const Windows held_out(data, split, data.size() - split, o.seq);
  const auto all = Evaluation::spread(held_out.count(), held_out.count(), 5, std::nullopt);
  EXPECT_NEAR(mean_loss(model, held_out, all).value(), valid_loss, 1e-6);
  EXPECT_TRUE(contains(contents(dir_ / "run" / "loss.svg"), "validation: "));
}

TEST_F(TrainerTest, SamplesAreAPureFunctionOfTheSeed) {
  Trainer trainer(cpu_, dir_ / "run", options(), Start::fresh);
  trainer.run(progress_, [] { return 0; });
  const std::vector<int32_t> prompt = {'l', 'i'};
  const auto draw = [&](double temperature, uint64_t seed) {
    return sample(trainer.model(), prompt, {.length = 40, .temperature = temperature, .seed = seed});
  };
  EXPECT_EQ(draw(1, 3), draw(1, 3));
  EXPECT_NE(draw(1, 3), draw(1, 4));
  EXPECT_EQ(draw(0, 3), draw(0, 4));
  EXPECT_EQ(draw(1, 3).size(), 40u);
  EXPECT_THROW(sample(trainer.model(), {}, {}), UsageError);
  EXPECT_THROW(sample(trainer.model(), prompt, {.length = -1}), UsageError);
  EXPECT_THROW(sample(trainer.model(), std::vector<int32_t>{256}, {}), UsageError);
}

TEST_F(TrainerTest, FilesAreNotMadeForARunThatCannotStart) {
  Options o = options();
  o.data = (dir_ / "absent").string();
  EXPECT_THROW(train(o, "run", Start::fresh), FileError);
  o = options();
  o.seq = 100000;
  EXPECT_THROW(train(o, "run", Start::fresh), FileError);
  o = options();
  o.document_separator = 256;
  EXPECT_THROW(train(o, "run", Start::fresh), UsageError);
  EXPECT_FALSE(fs::exists(dir_ / "run"));
}

}  // namespace
}  // namespace coda::train
