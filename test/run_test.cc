#include "train/run.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "coda/error.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

template <class Expected>
std::string message_of(const auto& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class RunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("coda_run_test_" + std::to_string(getpid()));
    fs::remove_all(dir_);
    fs::create_directory(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  fs::path dir_;
};

/// No field at its default.
Options unusual_options() {
  Options o;
  o.data = "/a/text \"quoted\"";
  o.valid = "/b";
  o.holdout = 0.25;
  o.token_type = TokenType::u32;
  o.vocab = 1000;
  o.document_separator = 7;
  o.in_order = true;
  o.seed = 0xffffffffffffffffu;
  o.init = "/c";
  o.hidden = 1;
  o.layers = 2;
  o.heads = 3;
  o.kv_heads = 5;
  o.head_dim = 6;
  o.ffn = 7;
  o.rope_theta = 0.1;
  o.rms_eps = 1e-300;
  o.tie = true;
  o.dtype = llama::Dtype::bf16;
  o.steps = int64_t{1} << 60;
  o.batch = 9;
  o.seq = 10;
  o.accumulate = 11;
  o.lr = 1.0 / 3;
  o.schedule = Schedule::Kind::cosine;
  o.warmup = 12;
  o.min_lr = 1e-5;
  o.weight_decay = 0.2;
  o.beta1 = 0.8;
  o.beta2 = 0.7;
  o.eps = 1e-7;
  o.clip = 2;
  o.device = DeviceKind::cuda;
  o.threads = 13;
  o.eval_every = 14;
  o.save_every = 15;
  o.keep = 16;
  return o;
}

TEST_F(RunTest, EveryOptionIsWrittenAndReadBack) {
  const RunRecord record{.options = unusual_options(),
                         .version = "1.2.3",
                         .data = {.path = "/a", .bytes = 5, .hash = "0123456789abcdef"},
                         .valid = DataRecord{.path = "/b", .bytes = 6, .hash = "fedcba9876543210"}};
  write_run(dir_, record);
  const RunRecord read = read_run(dir_);
  EXPECT_EQ(to_json(read.options), to_json(record.options));
  EXPECT_EQ(read.version, "1.2.3");
  EXPECT_EQ(read.data.path, "/a");
  EXPECT_EQ(read.data.bytes, 5);
  EXPECT_EQ(read.valid.value().hash, "fedcba9876543210");

  const auto usual = to_json(Options{}), unusual = to_json(unusual_options());
  ASSERT_EQ(usual.size(), unusual.size());
  for (const auto& [name, value] : usual.items()) EXPECT_NE(value, unusual[name]) << name;
}

TEST_F(RunTest, DamageIsNamed) {
  EXPECT_TRUE(contains(message_of<FileError>([&] { read_run(dir_); }), "there is no run.json"));
  for (const char* text : {"", "{", "[]", "{}", R"({"version": "1", "options": {"steps": 1.5}, "data": {}})",
                           R"({"version": "1", "options": {"dtype": "fp8"}, "data": {}})",
                           R"({"version": "1", "options": {}, "data": {"path": "x"}})"}) {
    std::ofstream(dir_ / "run.json") << text;
    EXPECT_TRUE(contains(message_of<FileError>([&] { read_run(dir_); }), "run.json: is ")) << text;
  }
}

TEST_F(RunTest, HostileFilesAreRefused) {
  const auto says = [&](const std::string& options, const std::string& part) {
    std::ofstream(dir_ / "run.json") << R"({"version": "1", "options": )" << options
                                     << R"(, "data": {"path": "/a", "bytes": 5, "hash": "00"}})";
    const std::string message = message_of<FileError>([&] { read_run(dir_); });
    EXPECT_TRUE(contains(message, "run.json: ") && contains(message, part)) << message.substr(0, 500);
    EXPECT_LT(message.size(), 400u);
  };
  says(R"({"threads": 4294967297})", "threads is 4294967297");
  says(R"({"steps": 9223372036854775808})", "steps is 9223372036854775808");
  says(R"({"steps": 1e300})", "steps is 1e+300");
  says(R"({"seed": -1})", "seed is -1");
  says(R"({"lr": true})", "lr is true");
  says(R"({"tie": 1})", "tie is 1");
  says(R"({"data": "/a\u0000b"})", "data is ");
  says(R"({"steps": 1, "steps": 2})", "\"steps\" twice");
  says(R"({"steps": )" + std::string(100'000, '['), "nested more than");
  says("{\"data\": \"\xff\"}", "is not valid JSON");
  says("{}" + std::string(1'000'000, ' '), "at most 1000000");
  std::ofstream(dir_ / "run.json")
      << R"({"version": "1", "options": {}, "data": {"path": "/a", "bytes": 1.5, "hash": ""}})";
  EXPECT_TRUE(contains(message_of<FileError>([&] { read_run(dir_); }), "bytes is 1.5"));
  fs::remove(dir_ / "run.json");
  ASSERT_EQ(mkfifo((dir_ / "run.json").c_str(), 0600), 0);
  EXPECT_TRUE(contains(message_of<FileError>([&] { read_run(dir_); }), "run.json: is not a regular file"));
}

TEST_F(RunTest, ChangedDataIsRefused) {
  const DataRecord before{.path = "/a", .bytes = 5, .hash = "0123456789abcdef"};
  DataRecord now = before;
  now.path = "/moved/here";
  refuse_changed_data(before, now);
  now.bytes = 6;
  EXPECT_TRUE(contains(message_of<FileError>([&] { refuse_changed_data(before, now); }), "6 bytes"));
  now.bytes = 5;
  now.hash = "0123456789abcdee";
  EXPECT_TRUE(contains(message_of<FileError>([&] { refuse_changed_data(before, now); }), "other contents"));
}

TEST_F(RunTest, ARunIsNotOverwritten) {
  refuse_to_overwrite(dir_);
  refuse_to_overwrite(dir_ / "new");
  std::ofstream(dir_ / "notes.txt") << "mine";
  refuse_to_overwrite(dir_);
  std::ofstream(dir_ / "model.safetensors") << "x";
  EXPECT_TRUE(contains(message_of<UsageError>([&] { refuse_to_overwrite(dir_); }), "(model.safetensors)"));
  std::ofstream(dir_ / "run.json") << "{}";
  const std::string message = message_of<UsageError>([&] { refuse_to_overwrite(dir_); });
  EXPECT_TRUE(contains(message, "--resume " + dir_.string())) << message;
  EXPECT_TRUE(contains(message_of<UsageError>([&] { refuse_to_overwrite(dir_ / "notes.txt"); }), "not a folder"));
}

TEST_F(RunTest, AFolderHasOneWriter) {
  const FolderLock lock(dir_);
  EXPECT_THROW(FolderLock{dir_}, UsageError);
}

TEST(OptionsTest, AResumedRunTakesWhatMayChange) {
  Options started, now;
  started.lr = 0.5;
  now.steps = 77;
  now.threads = 3;
  now.keep = 4;
  now.data = "/moved";
  now.lr = 0.25;  // not given
  const Options merged = resumed_options(started, now, {"steps", "threads", "data", "resume"});
  EXPECT_EQ(merged.steps, 77);
  EXPECT_EQ(merged.threads, 3);
  EXPECT_EQ(merged.keep, 1);
  EXPECT_EQ(merged.data, "/moved");
  EXPECT_EQ(merged.lr, 0.5);
}

TEST(OptionsTest, AResumedRunRefusesWhatMayNot) {
  Options started, now;
  EXPECT_EQ(resumed_options(started, now, {"lr", "beta1", "holdout"}).lr, started.lr);  // the same again
  now.lr = 0.25;
  now.beta2 = 0.5;
  now.valid = "/new";
  EXPECT_TRUE(contains(message_of<UsageError>([&] { resumed_options(started, now, {"lr"}); }), "--lr is 0.25"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { resumed_options(started, now, {"beta1", "beta2"}); }), "--betas"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { resumed_options(started, now, {"valid"}); }), "--valid"));
}

TEST(OptionsTest, NonsenseIsRefusedByName) {
  const auto refused = [](const char* part, const auto& change) {
    Options o;
    o.data = "x";
    check(o);
    change(o);
    EXPECT_TRUE(contains(message_of<UsageError>([&] { check(o); }), part)) << part;
  };
  refused("--data", [](Options& o) { o.data = ""; });
  refused("--batch is 0", [](Options& o) { o.batch = 0; });
  refused("--batch", [](Options& o) { o.batch = o.seq = o.accumulate = int64_t{1} << 62; });
  refused("--seq is -1", [](Options& o) { o.seq = -1; });
  refused("--steps", [](Options& o) { o.steps = 0; });
  refused("--lr is nan", [](Options& o) { o.lr = NAN; });
  refused("--min-lr", [](Options& o) { o.min_lr = 1; });
  refused("--betas", [](Options& o) { o.beta1 = 1; });
  refused("--holdout", [](Options& o) { o.holdout = 1; });
  refused("exclude each other", [](Options& o) { o.holdout = 0.1, o.valid = "x"; });
  refused("--vocab needs --token-type", [](Options& o) { o.vocab = 300; });
  refused("--token-type needs --vocab", [](Options& o) { o.token_type = TokenType::u16; });
  refused("--steps", [](Options& o) { o.steps = int64_t{1} << 61; });
  refused("--keep", [](Options& o) { o.keep = 0; });
}

TEST(OptionsTest, HoldoutHasADefaultUnlessInOrder) {
  Options o;
  EXPECT_EQ(o.holdout_fraction(), 0.05);
  o.in_order = true;
  EXPECT_EQ(o.holdout_fraction(), 0);
  o.holdout = 0.5;
  EXPECT_EQ(o.holdout_fraction(), 0.5);
}

}  // namespace
}  // namespace coda::train
