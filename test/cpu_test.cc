// The pool of threads: every index once, exceptions, threads that come late, many rounds.
#include "coda/cpu.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "coda/error.h"

namespace {

using coda::Cpu;

TEST(Cpu, EveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    Cpu cpu(threads);
    EXPECT_EQ(cpu.threads(), threads);
    for (int64_t count : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      std::atomic<bool> known{true};
      cpu.parallel_for(count, [&](int64_t i, int thread) {
        ++seen[static_cast<size_t>(i)];
        if (thread < 0 || thread >= threads) known = false;
      });
      for (const auto& times : seen) ASSERT_EQ(times, 1);
      EXPECT_TRUE(known);
    }
  }
}

TEST(Cpu, ManyShortRounds) {
  // More threads than cores, and rounds over before some of them wake: an index must not be taken in another round.
  Cpu cpu(6);
  int64_t total = 0;
  for (int round = 0; round < 20000; ++round) {
    std::atomic<int64_t> sum{0};
    const int64_t count = 2 + round % 7;
    cpu.parallel_for(count, [&](int64_t i, int) { sum += i + 1; });
    ASSERT_EQ(sum, count * (count + 1) / 2) << "round " << round;
    total += sum;
  }
  EXPECT_GT(total, 0);
}

TEST(Cpu, TheFirstExceptionComesBackAndThePoolGoesOn) {
  Cpu cpu(3);
  for (int round = 0; round < 50; ++round) {
    try {
      cpu.parallel_for(100, [](int64_t i, int) {
        if (i == 17) throw std::runtime_error("index 17");
      });
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "index 17");
    }
    std::atomic<int> count{0};
    cpu.parallel_for(10, [&](int64_t, int) { ++count; });
    EXPECT_EQ(count, 10);
  }
}

TEST(Cpu, TwoThreadsWorkAtTheSameTime) {
  Cpu cpu(2);
  std::atomic<int> here{0};
  // Each waits for the other: this ends only if both run.
  cpu.parallel_for(2, [&](int64_t, int) {
    ++here;
    while (here < 2) std::this_thread::yield();
  });
  EXPECT_EQ(here, 2);
}

TEST(Cpu, RunsOnThreadsOfTheCallers) {
  std::vector<int> tasks;  // of every round
  const auto run = [&](int count, const std::function<void(int)>& task) {
    tasks.push_back(count);
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(task, i);
    task(0);
    for (auto& thread : threads) thread.join();
  };
  Cpu cpu(3, run);
  EXPECT_EQ(cpu.threads(), 3);
  for (const int64_t count : {2, 3, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
    cpu.parallel_for(count, [&](int64_t i, int thread) {
      ++seen[static_cast<size_t>(i)];
      EXPECT_TRUE(thread >= 0 && thread < 3);
    });
    for (const auto& times : seen) ASSERT_EQ(times, 1);
  }
  EXPECT_EQ(tasks, (std::vector{2, 3, 3}));  // no more than there are indices
  EXPECT_THROW(cpu.parallel_for(10, [](int64_t, int) { throw std::runtime_error("from a task"); }), std::runtime_error);
}

TEST(Cpu, RunsOnThreadsThatComeOneAfterTheOther) {
  // A library that has fewer threads than it says, or is inside a parallel region of its own.
  Cpu cpu(4, [](int count, const std::function<void(int)>& task) {
    for (int i = 0; i < count; ++i) task(i);
  });
  std::atomic<int64_t> sum{0};
  cpu.parallel_for(100, [&](int64_t i, int) { sum += i; });
  EXPECT_EQ(sum, 4950);
}

TEST(Cpu, RefusesLessThanOneThreadOfTheCallers) {
  EXPECT_THROW(Cpu(0, [](int, const std::function<void(int)>&) {}), coda::UsageError);
}

TEST(Cpu, RefusesANegativeNumberOfThreads) {
  EXPECT_THROW(Cpu(-1), coda::UsageError);
}

}  // namespace
