// What coda bench --tune rests on that needs no GPU: which plan wins, what is kept of it, and what is said.
#include "bench/tuning.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace coda::bench {
namespace {

using coda::detail::HopperTile;

PlanTime plan(std::vector<double> rounds, int band = 1) {
  return {{HopperTile::cooperative_128x256, band}, time_of(std::move(rounds))};
}

TuneResult result_of(std::vector<PlanTime> plans) {
  TuneResult result{.product = gpu_cases({.hidden = {2048}, .rows = {"gradient"}}).back(),
                    .program = "Store<Tensors<bf16>, float>",
                    .plans = std::move(plans)};
  result.best = winner_of(result.plans);
  return result;
}

TEST(Tuning, APlanWinsIfItIsFasterByMoreThanTheNoise) {
  EXPECT_EQ(winner_of(std::vector{plan({1, 1, 1})}), 0U);
  EXPECT_EQ(winner_of(std::vector{plan({1, 1, 1}), plan({1.1, 1.1, 1.1}), plan({0.9, 0.9, 0.9})}), 2U);
  // Too little, if ever so steady.
  EXPECT_EQ(winner_of(std::vector{plan({1, 1, 1, 1}), plan({0.998, 0.998, 0.998, 0.998})}), 0U);
  // Two of four rounds: the median says so and the rounds do not.
  EXPECT_EQ(winner_of(std::vector{plan({1, 1, 1, 1}), plan({0.9, 1.2, 0.9, 1.2})}), 0U);
  EXPECT_EQ(winner_of(std::vector{plan({1, 1, 1, 1, 1}), plan({0.9, 1.01, 0.9, 0.9, 0.9})}), 1U);
  // What slows a whole round falls on both.
  EXPECT_EQ(winner_of(std::vector{plan({1, 2, 4, 8}), plan({0.9, 1.8, 3.6, 7.2})}), 1U);
}

TEST(Tuning, GainIsOfTheSameRounds) {
  EXPECT_DOUBLE_EQ(result_of({plan({1, 2, 4}), plan({0.5, 1, 2})}).gain(), 2);
  EXPECT_DOUBLE_EQ(result_of({plan({1, 2, 4}), plan({2, 4, 8})}).gain(), 1);
}

TEST(Tuning, TheMeanIsOfWhatWasMeasured) {
  TuneReport report;
  EXPECT_TRUE(std::isnan(mean_gain(report)));
  EXPECT_EQ(tune_summary(report), "");
  report.results = {result_of({plan({1}), plan({0.5})}), result_of({plan({1}), plan({2})}), {.failure = "no memory"}};
  EXPECT_DOUBLE_EQ(mean_gain(report), std::sqrt(2));
  const std::string said = tune_summary(report);
  EXPECT_NE(said.find("1.4142, geometric mean of 2 products (bar 1.03: over)"), std::string::npos) << said;
  EXPECT_NE(said.find("another plan won 1 times, by 100.0 % at most"), std::string::npos) << said;
}

TEST(Tuning, KeepsTheWinnerUnderItsClassOfShapes) {
  const TuneResult result = result_of({plan({1}), plan({0.5}, 8)});
  const hopper::TunedEntry entry = entry_of(result, "NVIDIA H200");
  hopper::TunedPlans plans;
  plans.put(entry);
  const hopper::TunedPlan* found = plans.find("NVIDIA H200", "Store<Tensors<bf16>, float>", coda::detail::Form::NT,
                                              {result.product.m, result.product.n, result.product.k});
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->tile, HopperTile::cooperative_128x256);
  EXPECT_EQ(found->band, 8);
  // An untuned plan that stays is kept too: an older one may stand there.
  EXPECT_EQ(entry_of(result_of({plan({1}), plan({2}, 8)}), "NVIDIA H200").plan.band, 1);
}

TEST(Tuning, SaysBothPlansTheirTimesAndTheRatio) {
  const std::string won = text_of(result_of({plan({2e-3}), plan({1e-3}, 8)}));
  for (const char* part : {"Store, fp32", "11264, 2048, 16384 NT", "cooperative 128x256, 1 ", "2.0000",
                           "cooperative 128x256, 8 ", "1.0000", "2.000\n"})
    EXPECT_NE(won.find(part), std::string::npos) << part << ": " << won;
  EXPECT_NE(text_of(result_of({plan({1e-3}), plan({2e-3})})).find("the same"), std::string::npos);
  TuneResult failed = result_of({plan({1})});
  failed.failure = "a kernel failed";
  EXPECT_NE(text_of(failed).find("a kernel failed"), std::string::npos);

  TuneReport report{.card = "NVIDIA H200", .driver = "580", .options = {}, .results = {}};
  EXPECT_NE(tune_table_head(report).find("NVIDIA H200, driver 580"), std::string::npos);
  report.results = {result_of({plan({2e-3, 4e-3, 2e-3}), plan({1e-3, 2e-3, 1e-3}, 8)}), failed};
  const auto json = nlohmann::json::parse(json_of(report));
  EXPECT_EQ(json["gpu"], "NVIDIA H200");
  EXPECT_EQ(json["untuned_to_best"], 2);
  EXPECT_EQ(json["results"][0]["best"], 1);
  EXPECT_EQ(json["results"][0]["plans"][1]["band"], 8);
  EXPECT_EQ(json["results"][0]["plans"][1]["rounds_s"].size(), 3U);
  EXPECT_EQ(json["results"][1]["failure"], "a kernel failed");
}

}  // namespace
}  // namespace coda::bench
