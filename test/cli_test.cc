// The built program, as a shell runs it: exit codes, and one line on stderr for an error.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

namespace {

namespace fs = std::filesystem;

/// Beside the folder of the tests, as CMake puts it.
std::string coda_binary() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "coda").string();
}

struct Result {
  int code = -1;
  std::string out, error;
};

class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("coda_cli_test_" + std::to_string(getpid()));
    fs::remove_all(dir_);
    fs::create_directory(dir_);
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 200; ++i) text << "line " << i * i % 37 << " of a text\n";
    std::ofstream ids(dir_ / "ids", std::ios::binary);
    for (int i = 0; i < 400; ++i) ids << static_cast<char>(i * i % 50) << '\0';
  }
  void TearDown() override { fs::remove_all(dir_); }

  /// In the test's folder.
  Result coda(const std::string& arguments) const { return shell(coda_binary() + " " + arguments); }
  Result shell(const std::string& command) const {
    Result result;
    FILE* pipe = popen(("cd " + dir_.string() + " && { " + command + "; } 2>stderr").c_str(), "r");
    char buffer[4096];
    for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) result.out.append(buffer, size);
    const int status = pclose(pipe);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::stringstream error;
    error << std::ifstream(dir_ / "stderr").rdbuf();
    result.error = error.str();
    return result;
  }

  void expect_refused(const std::string& arguments, int code, const std::string& part) const {
    const Result result = coda(arguments);
    EXPECT_EQ(result.code, code) << arguments;
    EXPECT_EQ(std::ranges::count(result.error, '\n'), 1) << arguments << ": " << result.error;
    EXPECT_TRUE(result.error.starts_with("coda: ")) << result.error;
    EXPECT_NE(result.error.find(part), std::string::npos) << arguments << ": " << result.error;
  }

  fs::path dir_;
  const std::string tiny_ =
      "train --hidden 16 --layers 1 --heads 1 --kv-heads 1 --head-dim 16 --ffn 16 --batch 2 --seq 16 --threads 1 ";
};

TEST_F(CliTest, HelpAndVersion) {
  for (const char* arguments : {"--help", "train --help", "eval --help", "sample --help", "explain --help",
                                "explain block --help", "verify --help", "bench --help"}) {
    const Result result = coda(arguments);
    EXPECT_EQ(result.code, 0) << arguments;
    EXPECT_NE(result.out.find("coda "), std::string::npos);
    EXPECT_EQ(result.error, "");
  }
  EXPECT_TRUE(coda("--version").out.starts_with("coda "));
}

TEST_F(CliTest, SaysThatAnEngineIsSlow) {
  const std::string train = coda_binary() + " " + tiny_ + "--data text --holdout 0 --steps 1 --out ";
  const Result slow = shell("CODA_CPU_ISA=generic " + train + "slow");
  EXPECT_EQ(slow.code, 0);
  EXPECT_TRUE(slow.error.starts_with("coda: running on SSE2")) << slow.error;
  const Result unknown = shell("CODA_CPU_ISA=mmx " + train + "unknown");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_EQ(unknown.error, "coda: CODA_CPU_ISA is mmx; it needs generic, avx2, avx512 or avx512_bf16\n");
}

TEST_F(CliTest, MisuseExitsWithTwo) {
  expect_refused("", 2, "subcommand");
  expect_refused("fly", 2, "");
  expect_refused("train", 2, "--data");
  expect_refused("train --data text --steps many", 2, "--steps");
  expect_refused("train --data text --bogus", 2, "--bogus");
  expect_refused("train --data text --dtype fp8", 2, "fp8 is not one of bf16|fp32");
  expect_refused("train --data text --batch 0", 2, "--batch is 0");
  expect_refused("train --data text --heads 3", 2, "--heads");
  expect_refused("train --data ids --token-type u16", 2, "--vocab");
  expect_refused("train --data text --device tpu", 2, "tpu is not one of cpu|cuda");
  expect_refused("train --data text --device cuda --dtype fp32", 2, "--device cuda trains in bf16");
  expect_refused("train --data text --device cuda --out gpu", 2, "--device is cuda, but ");
  EXPECT_FALSE(fs::exists(dir_ / "gpu"));
  expect_refused("train --data text --preset llama-2b", 2, "llama-2b not in");
  expect_refused("eval --data text", 2, "--model");
  expect_refused("train --data text --threads -1", 2, "--threads");
  expect_refused("bench step --preset llama-1b --hidden 64", 2, "--hidden excludes --preset");
  expect_refused("bench --device cuda step --dtype bf16", 2, "--dtype means nothing with --device cuda");
  expect_refused("bench blocks", 2, "blocks is not one of programs, block, step");
  expect_refused("bench block --hidden 512,1024", 2, "--hidden takes one size on the CPU");
  expect_refused("bench block --warm 1", 2, "--warm means nothing with --device cpu");
  expect_refused("bench block --slices 2", 2, "--slices means nothing with --device cpu");
  expect_refused("bench --tune --slices 2", 2, "--slices means nothing with --tune");
  expect_refused("bench --device cuda block", 2, "block is not a row of the GPU's table");
  expect_refused("bench --device cuda --hidden 2048,1000", 2, "--hidden is 1000");
  expect_refused("bench --device cuda --threads 2", 2, "--threads means nothing with --device cuda");
  expect_refused("bench --tune --device cpu", 2, "--tune is of a GPU's plans; --device is cpu");
  expect_refused("bench --tune --preset llama-1b", 2, "--preset means nothing with --tune");
  expect_refused("bench --tune block", 2, "block is not a row of the GPU's table");
}

/// A preset is a shape, of which options given beside it are changed.
TEST_F(CliTest, PresetIsAShape) {
  const Result result = coda(
      "train --data text --preset llama-1b --layers 1 --hidden 64 --ffn 128 --heads 4 --kv-heads 2 --head-dim 16 --seq "
      "8 "
      "--batch 1 --steps 1 --device cpu --out preset");
  ASSERT_EQ(result.code, 0) << result.error;
  std::ifstream file(dir_ / "preset" / "config.json");
  const nlohmann::json config = nlohmann::json::parse(file);
  EXPECT_EQ(config.at("num_hidden_layers"), 1);
  EXPECT_EQ(config.at("hidden_size"), 64);
  EXPECT_EQ(config.at("tie_word_embeddings"), true);
  EXPECT_EQ(config.at("rms_norm_eps"), 1e-5);
}

TEST_F(CliTest, ExplainsProgramsAndBlocks) {
  EXPECT_NE(coda("explain").out.find("RmsNormSwiGlu<bf16, DropGateUp>"), std::string::npos);
  const Result program = coda("explain \"RmsNormSwiGlu<bf16, DropGateUp>\" --m 64 --n 32 --k 16 --json");
  EXPECT_EQ(program.code, 0) << program.error;
  EXPECT_EQ(nlohmann::json::parse(program.out).at("fused").at("flops"), 2 * 64 * 32 * 16);

  const std::string block = "explain block --hidden 64 --ffn 128 --tokens 256 --vocab 512 --tflops 1 --tbps 0.1 ";
  const Result shown = coda(block + "--svg layer.svg --json layer.json");
  EXPECT_EQ(shown.code, 0) << shown.error;
  EXPECT_NE(shown.out.find("layer, backward"), std::string::npos) << shown.out;
  std::ifstream picture(dir_ / "layer.svg"), data(dir_ / "layer.json");
  std::string first;
  std::getline(picture, first);
  EXPECT_TRUE(first.starts_with("<svg ")) << first;
  EXPECT_EQ(nlohmann::json::parse(data).at("vocab"), 512);
  EXPECT_EQ(nlohmann::json::parse(coda(block + "--json").out).at("hidden"), 64);

  const Result plans = coda("explain SwiGluBackward --m 16384 --n 5632 --k 2048 --machine h200");
  EXPECT_NE(plans.out.find("plans of the GPU engine for 16384 × 5632 × 2048 NN (NVIDIA H200"), std::string::npos);
  EXPECT_EQ(plans.error, "");
  const Result memory = coda("explain block --preset llama-1b --tokens 16384");
  EXPECT_NE(memory.out.find("gradients of attention's scores, for cuDNN"), std::string::npos) << memory.error;
  expect_refused("explain block --preset llama-1b --tokens 16384 --ffn 64", 2, "--ffn");
  expect_refused("explain block --preset llama-1b --tokens 16385", 2, "multiple of --seq");
  expect_refused("explain block --tokens 16", 2, "--hidden is 0");
  expect_refused("explain Store --m 16 --n 16 --k 16 --form TN", 2, "--form is of a GPU's plans");
  expect_refused("explain 'Store<float>' --m 16 --n 16 --k 16 --device cuda", 2, "a GPU's products are of bf16");
  expect_refused("explain RmsNormSwigl", 2, "RmsNormSwiGlu");
  expect_refused("explain RmsNormSwiGlu --m 16 --n 24 --k 16", 2, "--n is 24");
  expect_refused("explain RmsNormSwiGlu --m 0 --n 16 --k 16", 2, "--m is 0");
  expect_refused("explain RmsNormSwiGlu --m 16", 2, "--n");
  expect_refused("explain RmsNormSwiGlu --machine h100", 2, "--m, --n and --k");
  expect_refused("explain block --hidden 64 --ffn 128", 2, "--tokens");
  expect_refused("explain block --hidden 64 --ffn 100 --tokens 16", 2, "--ffn is 100");
  expect_refused("explain block --hidden 64 --ffn 128 --tokens 0", 2, "--tokens is 0");
  expect_refused("explain block --hidden 64 --ffn 128 --tokens 16 --heads 0", 2, "--heads");
  expect_refused("explain block --hidden 64 --ffn 128 --tokens 16 --machine h300", 2, "h300");
  expect_refused(block + "--svg absent/layer.svg", 1, "absent/layer.svg");
}

TEST_F(CliTest, FailureExitsWithOne) {
  expect_refused("train --data absent", 1, "absent: cannot be opened: No such file");
  expect_refused("train --data ids --token-type u16 --vocab 40", 1, "token ");
  expect_refused("train --resume absent", 1, "no run.json");
  expect_refused("eval --model absent --data text", 1, "absent");
  expect_refused("sample --model absent", 1, "absent");
}

TEST_F(CliTest, TrainsEvaluatesAndSamples) {
  const Result trained = coda(tiny_ + "--data text --out run --steps 6");
  EXPECT_EQ(trained.code, 0) << trained.error;
  EXPECT_EQ(trained.error, "");
  for (const char* part : {"step 6/6", "valid  loss ", "plot   run/loss.svg", "model  run", "sample"}) {
    EXPECT_NE(trained.out.find(part), std::string::npos) << part << "\n" << trained.out;
  }
  EXPECT_EQ(trained.out.find('\r'), std::string::npos);  // not a terminal

  expect_refused(tiny_ + "--data text --out run", 2, "--resume run");
  expect_refused("train --resume run --lr 5", 2, "--lr is 5");
  expect_refused("train --resume run --steps 5", 2, "has done 6");
  EXPECT_EQ(coda("train --resume run --steps 8").code, 0);

  const Result evaluated = coda("eval --model run --data text --seq 16 --threads 1");
  EXPECT_EQ(evaluated.code, 0) << evaluated.error;
  EXPECT_GT(nlohmann::json::parse(evaluated.out).at("loss").get<double>(), 1);

  const std::string sample = "sample --model run --prompt 'line ' --length 20 --temperature 0 --threads 1";
  const Result text = coda(sample);
  EXPECT_EQ(text.code, 0) << text.error;
  EXPECT_TRUE(text.out.starts_with("line "));
  EXPECT_EQ(coda(sample).out, text.out);
}

TEST_F(CliTest, AModelWithAWeightThatIsNotFiniteIsNamed) {
  EXPECT_EQ(coda(tiny_ + "--data text --out run --steps 1").code, 0);
  std::fstream model(dir_ / "run/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  model.seekp(-4, std::ios::end);
  model.write("\xff\xff\xff\x7f", 4);
  model.close();
  expect_refused("eval --model run --data text --seq 16 --threads 1", 1,
                 "run: the loss is nan; the first value that is not finite is in the weight lm_head.weight, row 255, "
                 "column 15 (nan)");
}

TEST_F(CliTest, WithoutOutEveryRunHasAFolderOfItsOwn) {
  for (int i = 0; i < 2; ++i) EXPECT_EQ(coda(tiny_ + "--data text --steps 1").code, 0);
  EXPECT_TRUE(fs::exists(dir_ / "runs/text/model.safetensors"));
  EXPECT_TRUE(fs::exists(dir_ / "runs/text-2/model.safetensors"));
}

TEST_F(CliTest, IdsInIdsOut) {
  const Result trained =
      coda(tiny_ + "--data ids --token-type u16 --vocab 50 --document-separator 0 --out run --steps 2");
  EXPECT_EQ(trained.code, 0) << trained.error;
  EXPECT_EQ(trained.out.find("sample"), std::string::npos);
  EXPECT_EQ(coda("eval --model run --data ids --token-type u16 --seq 16 --threads 1").code, 0);
  const Result sampled = coda("sample --model run --prompt '1, 2 3' --length 4 --threads 1");
  EXPECT_EQ(sampled.code, 0) << sampled.error;
  EXPECT_TRUE(sampled.out.starts_with("1 2 3 "));
  EXPECT_EQ(std::ranges::count(sampled.out, ' '), 6);
  expect_refused("sample --model run --prompt hello", 2, "ids");
  expect_refused("sample --model run --prompt 50", 2, "vocabulary is 50");
  expect_refused("sample --model run", 2, "--prompt is empty");
}

TEST_F(CliTest, VerifiesAProgramByName) {
  const Result result = coda("verify 'RmsNormSwiGlu<bf16, DropGateUp>' SwiGluBackward --rounds 0 --json rows.json");
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_EQ(result.error, "");
  for (const char* part :
       {"RmsNormSwiGlu<bf16, DropGateUp>", "SwiGluBackward<float>", "cpu generic", " ulp ", " rows passed"})
    EXPECT_NE(result.out.find(part), std::string::npos) << part << "\n" << result.out;
  EXPECT_EQ(result.out.find("FAIL"), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("\nRmsNormSwiGlu<float"), std::string::npos) << result.out;
  const auto rows = nlohmann::json::parse(std::ifstream(dir_ / "rows.json"));
  std::map<std::string, int> checks;
  for (const auto& row : rows) {
    ++checks[row.at("check").get<std::string>()];
    EXPECT_TRUE(row.at("passed").get<bool>()) << row;
    EXPECT_GT(row.at("calls").get<int>(), 0) << row;
    if (row.at("check") == "repetition") continue;
    EXPECT_GT(row.at("worst").at("ulps").get<double>(), 0) << row;
    EXPECT_LE(row.at("share_of_bound").get<double>(), 1) << row;
  }
  // Three programs, two of them with a derivative, on each engine.
  EXPECT_EQ(checks["oracle"], checks["repetition"]);
  EXPECT_EQ(checks["oracle"] * 2, checks["derivative"] * 3);
}

TEST_F(CliTest, VerifiesWhatThereIs) {
  const Result list = coda("verify --list");
  EXPECT_EQ(list.code, 0);
  for (const char* part :
       {"RmsNorm<float>\n", "CrossEntropyBackward<bf16, RecomputeLogits, Uncapped, WithoutLogitSum>\n"})
    EXPECT_NE(list.out.find(part), std::string::npos) << part;
  expect_refused("verify Sotre", 2, "no program is called Sotre; there are Store, ");
  expect_refused("verify --rounds -1", 2, "--rounds");
  expect_refused("verify --device tpu", 2, "--device");
  expect_refused("verify Store --rounds 0 --json absent/rows.json", 1, "absent/rows.json: cannot be written");
}

/// Whether the GPU half is there or not.
TEST_F(CliTest, VerifyingOnAGpuThatIsNotThereSaysWhatIsMissing) {
  if (fs::exists("/dev/nvidiactl")) GTEST_SKIP() << "there is a GPU";
  for (const char* device : {"cuda", "all"})
    expect_refused(std::string("verify Store --rounds 0 --device ") + device, 2, "GPU");
}

TEST_F(CliTest, ASignalStopsSavesAndSaysHowToGoOn) {
  const Result stopped = shell(coda_binary() + " " + tiny_ +
                               "--data text --out run --steps 1000000 >log & pid=$!; "
                               "while [ ! -s run/metrics.jsonl ]; do sleep 0.02; done; kill -TERM $pid; wait $pid; "
                               "code=$?; cat log; exit $code");
  EXPECT_EQ(stopped.code, 128 + 15);
  EXPECT_NE(stopped.out.find("train --resume run"), std::string::npos) << stopped.out;
  EXPECT_TRUE(fs::exists(dir_ / "run/model.safetensors"));
}

}  // namespace
