#include "train/metrics.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "coda/error.h"

namespace coda::train {
namespace {

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "coda_metrics_test_" + std::to_string(getpid());
    std::filesystem::remove(path_);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::string contents() const {
    std::stringstream all;
    all << std::ifstream(path_).rdbuf();
    return all.str();
  }
  void log_steps(int64_t first, int64_t last) {
    MetricsLog log(path_, first);
    for (int64_t k = first; k < last; ++k) {
      log.append({.step = k,
                  .loss = 1.0 / (3 + static_cast<double>(k)),
                  .grad_norm = 2,
                  .tokens_per_s = 3,
                  .lr = 4,
                  .valid_loss = {}});
    }
  }

  std::string path_;
};

TEST_F(MetricsTest, OneObjectALine) {
  MetricsLog log(path_, 0);
  log.append({.step = 0, .loss = 5.5, .grad_norm = 1.5, .tokens_per_s = 1000, .lr = 0.001, .valid_loss = std::nullopt});
  log.append({.step = 1, .loss = 0.1, .grad_norm = 1, .tokens_per_s = 1000, .lr = 0.001, .valid_loss = 5.25});
  log.sync();
  std::istringstream in(contents());
  std::string line;
  ASSERT_TRUE(std::getline(in, line));
  EXPECT_EQ(line, R"({"step":0,"loss":5.5,"grad_norm":1.5,"tokens_per_s":1000.0,"lr":0.001})");
  ASSERT_TRUE(std::getline(in, line));
  const auto second = nlohmann::json::parse(line);
  EXPECT_EQ(second["loss"].get<double>(), 0.1);
  EXPECT_EQ(second["valid_loss"].get<double>(), 5.25);
  EXPECT_FALSE(std::getline(in, line));
}

TEST_F(MetricsTest, ResumingCutsLaterStepsAndContinues) {
  log_steps(0, 10);
  const std::string whole = contents();
  log_steps(6, 10);
  EXPECT_EQ(contents(), whole);
  const MetricsLog log(path_, 4);
  ASSERT_EQ(log.steps().size(), 4u);
  EXPECT_EQ(log.steps().back().loss, 1.0 / 6);
}

TEST_F(MetricsTest, ATornLastLineIsCut) {
  log_steps(0, 5);
  const std::string whole = contents();
  // Every length that a crash can leave of the last line, its newline missing included.
  const size_t last = whole.rfind('\n', whole.size() - 2) + 1;
  for (size_t size = last; size < whole.size(); ++size) {
    std::ofstream(path_, std::ios::trunc) << whole.substr(0, size);
    log_steps(4, 5);
    ASSERT_EQ(contents(), whole) << size;
  }
  std::ofstream(path_, std::ios::app) << std::string(100, '\0');
  log_steps(5, 5);
  EXPECT_EQ(contents(), whole);
}

TEST_F(MetricsTest, AHistoryThatIsDamagedIsNamedAndNotCut) {
  const auto refused = [&](const std::string& text, int64_t step, const std::string& part) {
    std::ofstream(path_, std::ios::trunc) << text;
    try {
      MetricsLog log(path_, step);
      ADD_FAILURE() << "was read: " << text;
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(contents(), text);
  };
  log_steps(0, 6);
  const std::string whole = contents();
  const size_t third = whole.find("{\"step\":2");
  std::string damaged = whole;
  damaged[third] = '#';
  refused(damaged, 6, "line 3 is not that of step 2, and the checkpoint is of step 6");
  refused(whole.substr(0, third) + whole.substr(whole.find("{\"step\":3")), 6, "line 3 is not that of step 2");
  refused(whole.substr(0, third + 5), 6, "line 3");
  refused(std::string(100'000, 'x'), 1, "line 1");
  refused(std::string(100'000, '['), 1, "line 1");
  std::string not_whole = whole;
  not_whole.replace(not_whole.find(":0,"), 3, ":1e300,");
  refused(not_whole, 1, "line 1");
  // What the checkpoint does not have behind it is cut, whatever it is.
  std::ofstream(path_, std::ios::trunc) << damaged;
  EXPECT_EQ(MetricsLog(path_, 2).steps().size(), 2u);
  EXPECT_EQ(contents(), whole.substr(0, third));
}

TEST_F(MetricsTest, AHistoryThatWasPutAwayBeginsAgain) {
  log_steps(4, 6);
  EXPECT_EQ(MetricsLog(path_, 6).steps().size(), 2u);
}

TEST_F(MetricsTest, WhatIsNotAFileIsRefused) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THROW(MetricsLog(path_, 3), FileError);
  EXPECT_THROW(MetricsLog(testing::TempDir(), 3), FileError);
}

}  // namespace
}  // namespace coda::train
