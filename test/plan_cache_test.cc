// The file of tuned plans: what is found in it, what is ignored, and many processes that write it at once.
#include "hopper/plan_cache.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/tuning.h"
#include "coda/error.h"
#include "coda/programs/store.h"

namespace coda::hopper {
namespace {

using coda::detail::Form;
using coda::detail::HopperKernel;
using coda::detail::HopperKernels;
using coda::detail::HopperTile;

constexpr const char* kCard = "NVIDIA H200";
constexpr const char* kProgram = "Store<Tensors<bf16>>";

TunedEntry entry(Shape shape, HopperTile tile = HopperTile::cooperative_128x256, int band = 4) {
  return {.card = kCard, .program = kProgram, .form = Form::TN, .shape = shape, .plan = {tile, band}};
}

class PlanCache : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "coda_plans_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder = name;
    path = folder / "deep" / "plans.json";
  }
  void TearDown() override {
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    std::filesystem::remove_all(folder);
  }
  void write(std::string_view text) const {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  /// The number of plans in the file, and the line that was said about it.
  std::pair<size_t, std::string> loaded() const {
    ::testing::internal::CaptureStderr();
    const size_t plans = load_plans(path).size();
    return {plans, ::testing::internal::GetCapturedStderr()};
  }

  std::filesystem::path folder, path;
};

TEST_F(PlanCache, FindsAClassOfShapes) {
  EXPECT_EQ(class_of({16384, 5632, 2048}), (Shape{16384, 5120, 2048}));
  EXPECT_EQ(class_of({0, 7, 9}), (Shape{0, 7, 8}));
  bench::record_plans(path, std::vector{entry({16384, 5632, 2048})});
  const TunedPlans plans = load_plans(path);
  const TunedPlan* found = plans.find(kCard, kProgram, Form::TN, {17000, 5120, 2559});
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->tile, HopperTile::cooperative_128x256);
  EXPECT_EQ(found->band, 4);
  EXPECT_EQ(plans.find(kCard, kProgram, Form::TN, {16384, 5632, 2560}), nullptr);
  EXPECT_EQ(plans.find(kCard, kProgram, Form::NN, {16384, 5632, 2048}), nullptr);
  EXPECT_EQ(plans.find("NVIDIA H100", kProgram, Form::TN, {16384, 5632, 2048}), nullptr);
  EXPECT_EQ(plans.find(kCard, "Store<Tensors<bf16>, float>", Form::TN, {16384, 5632, 2048}), nullptr);
}

TEST_F(PlanCache, IgnoresWhatIsNotOneOfOurs) {
  EXPECT_EQ(loaded(), (std::pair<size_t, std::string>(0, "")));  // no file, no word
  bench::record_plans(path, std::vector{entry({16384, 2048, 2048}), entry({16384, 4096, 2048})});
  std::ifstream file(path);
  const std::string good(std::istreambuf_iterator<char>(file), {});
  EXPECT_EQ(loaded(), (std::pair<size_t, std::string>(2, "")));
  const auto with = [&](const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(good);
    json["plans"][0][key] = value;
    return json.dump();
  };
  auto newer = nlohmann::json::parse(good);
  newer["coda_plans"] = 3;
  std::vector<std::string> bad = {"",
                                  "\0\xff\xfe garbage",
                                  "[]",
                                  "{}",
                                  "null",
                                  R"({"coda_plans": 2})",
                                  R"({"coda_plans": 2, "plans": [3]})",
                                  R"({"coda_plans": 2, "plans": {"a": "b"}})",
                                  std::string(100000, '['),
                                  newer.dump(),
                                  with("tile", "pingpong 1x1"),
                                  with("tile", 4),
                                  with("band", 3),
                                  with("band", -8),
                                  with("band", int64_t{1} << 40),
                                  with("band", 2.5),
                                  with("m", "many"),
                                  with("m", -1),
                                  with("m", 1e300),
                                  with("form", "NTN"),
                                  with("card", nullptr)};
  for (size_t size = 0; size + 1 < good.size(); size += 37) bad.push_back(good.substr(0, size));
  for (const std::string& text : bad) {
    write(text);
    const auto [plans, said] = loaded();
    EXPECT_EQ(plans, 0U) << text.substr(0, 200);
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
    EXPECT_NE(said.find(path.string()), std::string::npos) << said;
  }
  // And it can be written again.
  ::testing::internal::CaptureStderr();
  bench::record_plans(path, std::vector{entry({16384, 2048, 2048})});
  ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(loaded(), (std::pair<size_t, std::string>(1, "")));
}

TEST_F(PlanCache, IgnoresWhatIsNoFile) {
  std::filesystem::create_directories(path);
  EXPECT_NE(loaded().second.find("is not a file"), std::string::npos);
  std::filesystem::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);  // nobody ever writes into it
  EXPECT_NE(loaded().second.find("is not a file"), std::string::npos);
}

TEST_F(PlanCache, SaysWhatCannotBeWritten) {
  write("");
  const std::filesystem::path under_a_file = path / "plans.json";
  EXPECT_THROW(bench::record_plans(under_a_file, std::vector{entry({1, 1, 1})}), FileError);
  if (::geteuid() == 0) return;  // may write everywhere
  std::filesystem::permissions(folder, std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_THROW(bench::record_plans(folder / "more" / "plans.json", std::vector{entry({1, 1, 1})}), FileError);
}

TEST_F(PlanCache, EightProcessesLoseNothing) {
  constexpr int kProcesses = 8, kEach = 12;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 0;
      for (int i = 0; i < kEach; ++i) {
        TunedEntry mine = entry({16384, 2048, 2048});
        mine.program = fmt::format("Program<{}, {}>", p, i);
        try {
          bench::record_plans(path, std::vector{mine});
        } catch (const std::exception&) {
          status = 1;
        }
      }
      ::_exit(status);
    }
    ASSERT_GT(child, 0);
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(loaded(), (std::pair<size_t, std::string>(kProcesses * kEach, "")));
}

TEST_F(PlanCache, LiesWhereTheConventionPutsIt) {
  const auto set = [](const char* name, const char* value) {
    value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
  };
  set("CODA_CACHE", "/a");
  set("XDG_CACHE_HOME", "/b");
  set("HOME", "/c");
  EXPECT_EQ(plan_cache_path(), "/a/plans.json");
  set("CODA_CACHE", nullptr);
  EXPECT_EQ(plan_cache_path(), "/b/coda/plans.json");
  set("XDG_CACHE_HOME", "relative");
  EXPECT_EQ(plan_cache_path(), "/c/.cache/coda/plans.json");
  set("HOME", nullptr);
  EXPECT_FALSE(plan_cache_path());
}

TEST_F(PlanCache, DecidesWhereItsPlanIsACandidate) {
  alignas(256) static bf16 memory[64];
  const HopperKernel both[] = {{Form::TN, HopperTile::pingpong_128x128, nullptr},
                               {Form::TN, HopperTile::cooperative_128x256, nullptr}};
  const auto choice = [&](const TunedEntry& tuned, int64_t rows, size_t kernels) {
    TunedPlans plans;
    plans.put(tuned);
    const HopperKernels of{std::span(both, kernels), nullptr, kProgram};
    Plan plan;
    const Store<> store{.out = Matrix<bf16>(memory, rows, 2048)};
    coda::detail::with_program(store, [&](const coda::detail::ProgramInfo& info) {
      plan = choose(coda::detail::factor(Matrix<bf16>(memory, rows, 2048)),
                    coda::detail::factor(Matrix<bf16>(memory, 2048, 2048)), info, of, 132, kCard, plans);
    });
    return plan;
  };
  const TunedEntry tuned = entry({16384, 2048, 2048}, HopperTile::cooperative_128x256, 2);
  const Plan taken = choice(tuned, 16384, 2);
  EXPECT_TRUE(taken.tuned);
  EXPECT_EQ(taken.kernel->tile, HopperTile::cooperative_128x256);
  EXPECT_EQ(taken.band, 2);
  EXPECT_FALSE(choice(tuned, 16384, 1).tuned);       // the program has no such tile
  EXPECT_TRUE(choice(tuned, 16384 + 256, 2).tuned);  // of the same class
  EXPECT_FALSE(choice(tuned, 1 << 20, 2).tuned);
}

TEST_F(PlanCache, IsLookedUpInLessThanAMicrosecond) {
  TunedPlans plans;
  for (int64_t n = 0; n < 1000; ++n) plans.put(entry({16384, n * 128, 2048}));
  constexpr int kLookups = 100000;
  double best = 1;
  int found = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kLookups; ++i)
      found += plans.find(kCard, kProgram, Form::TN, {16384, i % 1000 * 128, 2048}) != nullptr ? 1 : 0;
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  EXPECT_EQ(found, 5 * kLookups);
#ifdef NDEBUG
  EXPECT_LT(best / kLookups, 1e-6);
#endif
}

}  // namespace
}  // namespace coda::hopper
