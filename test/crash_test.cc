// Training that is killed, and training that cannot write: the last good checkpoint loads, no more is lost than the steps since
// it was saved, and the run goes on to the bits of one that nobody disturbed.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "coda/error.h"
#include "train/checkpoint.h"
#include "train/state.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr int kKillsOnAGpu = 2;
constexpr int kKills = 36, kSizeLimits = 14, kFullDisks = 6;  // 50 crashes where mounting is not permitted
constexpr int64_t kSaveEvery = 2, kSaved = 3 * kSaveEvery, kSteps = 240;

/// Beside the folder of the tests, as CMake puts it.
fs::path coda_binary() {
  return fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "coda";
}

std::string contents(const fs::path& path) {
  std::stringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  return all.str();
}

/// What every step came to, by its number; the clock is left out. A last line that was torn is not counted.
std::vector<std::string> steps_of(const fs::path& run) {
  std::istringstream lines(contents(run / "metrics.jsonl"));
  std::vector<std::string> steps;
  std::string line;
  while (std::getline(lines, line) && !lines.eof()) {
    auto object = nlohmann::json::parse(line);
    EXPECT_EQ(object.at("step"), steps.size());
    object.erase("tokens_per_s");
    steps.push_back(object.dump());
  }
  return steps;
}

struct Ended {
  int status = 0;
  std::string error;  // stderr
  bool exited_with(int code) const { return WIFEXITED(status) && WEXITSTATUS(status) == code; }
};

class CrashTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // In memory if there is such a folder: what a kill leaves behind does not depend on the disk, and to force some hundred
    // files to one that others write to takes minutes.
    const fs::path memory = "/dev/shm";
    dir_ = (access(memory.c_str(), W_OK) == 0 ? memory : fs::path(testing::TempDir())) /
           ("coda_crash_test_" + std::to_string(getpid()));
    fs::remove_all(dir_);
    fs::create_directory(dir_);
    std::ofstream text(dir_ / "text");
    for (int i = 0; i < 300; ++i) text << "line " << i * i % 37 << " of a text\n";
    text.close();
    if (const char* given = std::getenv("CODA_CRASH_SEED"))
      seed_ = static_cast<unsigned>(std::strtoul(given, nullptr, 10));
    random_.seed(seed_);
    const Ended ended = wait_for(start(fresh("reference", kSteps, kSteps)));
    ASSERT_TRUE(ended.exited_with(0)) << ended.error;
    reference_ = steps_of(dir_ / "reference");
    ASSERT_EQ(std::ssize(reference_), kSteps);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string fresh(const fs::path& run, int64_t steps = kSteps, int64_t save_every = kSaveEvery) const {
    return fmt::format(
        "train --data {} --out {} --steps {} --save-every {} --hidden 16 --layers 1 --heads 1 --kv-heads 1 "
        "--head-dim 16 --ffn 16 --batch 2 --seq 16 --threads 1 --holdout 0",
        (dir_ / "text").string(), (dir_ / run).string(), steps, save_every);
  }
  static std::string resumed(const fs::path& run, int64_t steps = kSteps, int64_t save_every = kSaveEvery) {
    return fmt::format("train --resume {} --steps {} --save-every {}", run.string(), steps, save_every);
  }
  /// A run that ended after three saves.
  void make_saved_run(const fs::path& run) const {
    const Ended ended = wait_for(start(fresh(run, kSaved)));
    EXPECT_TRUE(ended.exited_with(0)) << ended.error;
  }

  /// A program that has begun; its stderr goes to a file. prepare runs in it first.
  pid_t start(const std::string& arguments, const std::function<void()>& prepare = {}) const {
    std::istringstream stream(coda_binary().string() + " " + arguments);
    std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string error = (dir_ / "stderr").string();
    const pid_t pid = fork();
    if (pid != 0) return pid;
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
    dup2(open(error.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
    if (prepare) prepare();
    execv(argv[0], argv.data());
    _exit(127);
  }
  Ended wait_for(pid_t pid) const {
    Ended ended;
    EXPECT_EQ(waitpid(pid, &ended.status, 0), pid);
    ended.error = contents(dir_ / "stderr");
    return ended;
  }

  /// What has to hold whenever a run has stopped, however it did. Returns the step of its checkpoint.
  int64_t expect_good_checkpoint(const fs::path& run, int64_t save_every = kSaveEvery) const {
    const std::vector<std::string> steps = steps_of(run);
    for (size_t k = 0; k < steps.size(); ++k) EXPECT_EQ(steps[k], reference_[k]);
    const std::optional<int64_t> saved = saved_step(run);
    EXPECT_TRUE(saved.has_value());
    // Step k is trained on when the saves before it are done.
    const int64_t last_save = std::max<int64_t>(0, std::ssize(steps) - 1) / save_every * save_every;
    EXPECT_GE(saved.value_or(-1), last_save);
    EXPECT_GE(std::ssize(steps), saved.value_or(-1));
    const Ended evaluated = wait_for(start(fmt::format("eval --model {} --data {} --seq 16 --steps 1 --threads 1",
                                                       run.string(), (dir_ / "text").string())));
    EXPECT_TRUE(evaluated.exited_with(0)) << evaluated.error;
    return saved.value_or(-1);
  }
  /// To the end, undisturbed: as the reference, bit for bit.
  void expect_resumes_to_the_reference(const fs::path& run) const {
    const Ended ended = wait_for(start(resumed(run)));
    EXPECT_TRUE(ended.exited_with(0)) << ended.error;
    EXPECT_EQ(steps_of(run), reference_);
    for (const std::string& name :
         {std::string("model.safetensors"), fmt::format("optimizer-{}.safetensors", kSteps)}) {
      EXPECT_TRUE(contents(run / name) == contents(dir_ / "reference" / name)) << name;
    }
  }
  /// A few steps more, each as the reference's.
  void expect_goes_on(const fs::path& run) const {
    const Ended ended = wait_for(start(resumed(run, kSaved + 8)));
    EXPECT_TRUE(ended.exited_with(0)) << ended.error;
    EXPECT_EQ(expect_good_checkpoint(run), kSaved + 8);
  }
  /// One line that names a file in the folder and the system's reason. Returns the file's name.
  static std::string expect_named_fault(const Ended& ended, const fs::path& run, const std::string& reason) {
    EXPECT_TRUE(ended.exited_with(1)) << "status " << ended.status << ": " << ended.error;
    EXPECT_EQ(std::ranges::count(ended.error, '\n'), 1) << ended.error;
    EXPECT_TRUE(ended.error.starts_with("coda: " + run.string() + "/")) << ended.error;
    EXPECT_NE(ended.error.find(reason), std::string::npos) << ended.error;
    const size_t name = 6 + run.string().size() + 1;  // after "coda: "
    return ended.error.size() < name ? "" : ended.error.substr(name, ended.error.find(':', name) - name);
  }

  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }

  fs::path dir_;
  unsigned seed_ = 1;
  std::mt19937_64 random_;
  std::vector<std::string> reference_;
};

TEST_F(CrashTest, KilledAtAnyMoment) {
  SCOPED_TRACE(fmt::format("CODA_CRASH_SEED={}", seed_));
  int kills = 0, in_a_save = 0;
  for (int attempt = 0; kills < kKills && !HasFailure(); ++attempt) {
    ASSERT_LT(attempt, kKills);
    const fs::path run = dir_ / fmt::format("run-{}", attempt);
    bool begun = false, finished = false;
    while (kills < kKills && !finished && !HasFailure()) {
      const int64_t from = begun ? saved_step(run).value_or(0) : 0;
      const pid_t pid = start(begun ? resumed(run) : fresh(run));
      begun = true;
      // Three saves first, then any moment of the steps and of the saves that follow.
      while (waitpid(pid, nullptr, WNOHANG) == 0) {
        if (fs::exists(run / "model.safetensors") && saved_step(run).value_or(0) >= from + kSaved) break;
        std::this_thread::sleep_for(1ms);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(below(40'000)));
      finished = kill(pid, SIGKILL) != 0;
      if (!finished) {
        int status = 0;
        waitpid(pid, &status, 0);
        finished = !WIFSIGNALED(status);
      }
      kills += !finished;
      in_a_save += !finished && std::ranges::any_of(fs::directory_iterator(run), [](const fs::directory_entry& entry) {
        return entry.path().extension() == ".partial";
      });
      const int64_t saved = expect_good_checkpoint(run);
      EXPECT_GE(saved, std::min(kSteps, from + kSaved));
    }
    expect_resumes_to_the_reference(run);
    fs::remove_all(run);
  }
  fmt::print("killed {} times, {} of them while a file was written; CODA_CRASH_SEED={}\n", kills, in_a_save, seed_);
}

/// The same on a GPU, between saves: what the steps since the last one came to, they come to again. Skipped where there is none.
TEST_F(CrashTest, KilledOnAGpu) {
  SCOPED_TRACE(fmt::format("CODA_CRASH_SEED={}", seed_));
  if (access("/dev/nvidiactl", F_OK) != 0) GTEST_SKIP() << "there is no GPU here";
  constexpr int64_t kGpuSteps = 400, kGpuSaveEvery = 80;
  const auto on_gpu = [&](const char* run) {
    return fmt::format(
        "train --data {} --out {} --steps {} --save-every {} --device cuda --hidden 128 --layers 2 --heads 2 "
        "--kv-heads 1 "
        "--head-dim 64 --ffn 256 --batch 2 --seq 64 --accumulate 2 --holdout 0",
        (dir_ / "text").string(), (dir_ / run).string(), kGpuSteps, kGpuSaveEvery);
  };
  const Ended undisturbed = wait_for(start(on_gpu("gpu-reference")));
  if (undisturbed.error.find("built without its GPU half") != std::string::npos)
    GTEST_SKIP() << "build/coda has no GPU half; `make cuda` builds it";
  ASSERT_TRUE(undisturbed.exited_with(0)) << undisturbed.error;
  const std::vector<std::string> reference = steps_of(dir_ / "gpu-reference");
  ASSERT_EQ(std::ssize(reference), kGpuSteps);

  const fs::path run = dir_ / "gpu-run";
  int64_t repeated = 0;
  for (int kills = 0; kills < kKillsOnAGpu; ++kills) {
    const int64_t from = kills == 0 ? 0 : saved_step(run).value_or(0);
    const pid_t pid = start(kills == 0 ? on_gpu("gpu-run") : resumed(run, kGpuSteps, kGpuSaveEvery));
    // A save, and about half of the steps to the next one.
    const int64_t until = from + kGpuSaveEvery + kGpuSaveEvery / 2 + below(kGpuSaveEvery / 4);
    while (waitpid(pid, nullptr, WNOHANG) == 0 && std::ranges::count(contents(run / "metrics.jsonl"), '\n') < until)
      std::this_thread::sleep_for(1ms);
    ASSERT_EQ(kill(pid, SIGKILL), 0) << contents(dir_ / "stderr");
    int status = 0;
    waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << contents(dir_ / "stderr");
    const std::vector<std::string> steps = steps_of(run);
    for (size_t k = 0; k < steps.size(); ++k) ASSERT_EQ(steps[k], reference[k]);
    repeated += std::ssize(steps) - saved_step(run).value_or(0);
  }
  EXPECT_GT(repeated, 0) << "it was killed right behind its saves";
  const Ended ended = wait_for(start(resumed(run, kGpuSteps, kGpuSaveEvery)));
  EXPECT_TRUE(ended.exited_with(0)) << ended.error;
  EXPECT_EQ(steps_of(run), reference);
  for (const std::string& name : {std::string("model.safetensors"), fmt::format("optimizer-{}.safetensors", kGpuSteps)})
    EXPECT_TRUE(contents(run / name) == contents(dir_ / "gpu-reference" / name)) << name;
  fmt::print("killed {} times on a GPU, {} steps were trained on again; CODA_CRASH_SEED={}\n", kKillsOnAGpu, repeated,
             seed_);
}

TEST_F(CrashTest, AFileThatMayNotGrow) {
  SCOPED_TRACE(fmt::format("CODA_CRASH_SEED={}", seed_));
  const fs::path saved = dir_ / "saved", run = dir_ / "run";
  make_saved_run(saved);
  const auto largest = static_cast<int64_t>(fs::file_size(saved / fmt::format("optimizer-{}.safetensors", kSaved)));
  std::set<std::string> names;
  for (int i = 0; i < kSizeLimits && !HasFailure(); ++i) {
    fs::remove_all(run);
    fs::copy(saved, run);
    // Every third is small enough for metrics.jsonl to reach it before the next save.
    const bool metrics = i % 3 == 0;
    const int64_t save_every = metrics ? kSteps : kSaveEvery;
    const auto limit = static_cast<rlim_t>(metrics ? 2000 + below(1500) : 512 + below(largest - 512));
    const Ended ended = wait_for(start(resumed(run, kSteps, save_every), [limit] {
      const rlimit small{limit, limit};
      setrlimit(RLIMIT_FSIZE, &small);
    }));
    names.insert(expect_named_fault(ended, run, "File too large"));
    EXPECT_EQ(expect_good_checkpoint(run, save_every), kSaved);
    expect_goes_on(run);
  }
  // Otherwise the limits do not test what they are meant to.
  EXPECT_TRUE(names.contains("metrics.jsonl"));
  EXPECT_TRUE(names.contains(fmt::format("optimizer-{}.safetensors.partial", kSaved + kSaveEvery)));
}

/// Runs body in a process with a file system of its own, of this many bytes, at dir; returns its exit status, or nothing where
/// mounting is not permitted.
std::optional<int> on_small_disk(const fs::path& dir, int64_t bytes, const std::function<void()>& body) {
  constexpr int kNotPermitted = 77;
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", dir.c_str(), "tmpfs", 0, fmt::format("size={}", bytes).c_str()) != 0) {
      _exit(kNotPermitted);
    }
    body();
    std::fflush(nullptr);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotPermitted) return std::nullopt;
  return status;
}

TEST_F(CrashTest, ADiskThatIsFull) {
  SCOPED_TRACE(fmt::format("CODA_CRASH_SEED={}", seed_));
  const fs::path disk = dir_ / "disk";
  fs::create_directory(disk);
  for (int i = 0; i < kFullDisks && !HasFailure(); ++i) {
    // Pages of 4096 bytes: the optimizer's file takes 30, the model's 10 more.
    const int64_t left = i == 0 ? 0 : below(40);
    const auto status = on_small_disk(disk, int64_t{1} << 22, [&] {
      const fs::path run = disk / "run";
      make_saved_run(run);
      const auto available = static_cast<int64_t>(fs::space(disk).available);
      std::ofstream(disk / "others", std::ios::binary)
          << std::string(static_cast<size_t>(available - left * 4096), 'x');
      expect_named_fault(wait_for(start(resumed(run, kSteps))), run, "No space left on device");
      EXPECT_EQ(expect_good_checkpoint(run), kSaved);
      fs::remove(disk / "others");
      expect_goes_on(run);
    });
    if (!status) GTEST_SKIP() << "mounting is not permitted here";
    EXPECT_EQ(*status, 0) << left << " pages left";
  }
}

}  // namespace
}  // namespace coda::train
