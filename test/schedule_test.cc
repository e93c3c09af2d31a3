#include "train/schedule.h"

#include <gtest/gtest.h>

namespace coda::train {
namespace {

TEST(ScheduleTest, Constant) {
  const Schedule schedule{.lr = 0.5, .steps = 10};
  EXPECT_EQ(schedule.at(0), 0.5);
  EXPECT_EQ(schedule.at(1000), 0.5);
}

TEST(ScheduleTest, WarmupRisesToTheFullRate) {
  const Schedule schedule{.lr = 1, .warmup = 4, .steps = 10};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.at(2), 0.75);
  EXPECT_DOUBLE_EQ(schedule.at(3), 1);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1);
}

TEST(ScheduleTest, CosineFallsToTheMinimum) {
  const Schedule schedule{.kind = Schedule::Kind::cosine, .lr = 1, .min_lr = 0.2, .warmup = 10, .steps = 110};
  EXPECT_DOUBLE_EQ(schedule.at(10), 1);
  EXPECT_DOUBLE_EQ(schedule.at(60), 0.6);
  EXPECT_DOUBLE_EQ(schedule.at(110), 0.2);
  EXPECT_DOUBLE_EQ(schedule.at(500), 0.2);
  for (int64_t step = 10; step < 109; ++step) EXPECT_GT(schedule.at(step), schedule.at(step + 1));
}

TEST(ScheduleTest, WarmupLongerThanTheRun) {
  const Schedule schedule{.kind = Schedule::Kind::cosine, .lr = 1, .warmup = 20, .steps = 10};
  EXPECT_DOUBLE_EQ(schedule.at(9), 0.5);
}

}  // namespace
}  // namespace coda::train
