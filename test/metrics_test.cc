#include "train/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

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

}  // namespace
}  // namespace coda::train
