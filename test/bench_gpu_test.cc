// What coda bench --device cuda rests on that needs no GPU: cases, statistics, tables, and the two references.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/bf16_path.h"
#include "bench/gpu.h"
#include "bench/gpu_report.h"
#include "bench/sampled_product.h"
#include "buffer.h"

namespace coda::bench {
namespace {

using Json = nlohmann::json;
using Grid = oracle::Grid<double>;

TEST(GpuCases, AreTheTablesShapes) {
  EXPECT_EQ(gpu_ffn(2048), 5632);
  EXPECT_EQ(gpu_ffn(4096), 11008);
  EXPECT_EQ(gpu_ffn(8192), 22016);
  EXPECT_EQ(gpu_ffn(768), 2048);
  const std::vector<GpuCase> cases =
      gpu_cases({.hidden = {2048}, .tokens = 16384, .rows = {"norm-backward", "gradient"}});
  ASSERT_EQ(cases.size(), 5U);
  EXPECT_EQ(cases[0].row->name, "norm-backward");
  EXPECT_EQ(cases[0].m, 16384);
  EXPECT_EQ(cases[0].n, 2048);
  EXPECT_EQ(cases[0].k, 2 * 5632);
  EXPECT_EQ(cases[1].k, 3 * 2048);
  EXPECT_EQ(cases[4].row->form, Form::NT);  // the gradient of a weight, over tokens
  EXPECT_EQ(cases[4].m, 2 * 5632);
  EXPECT_EQ(cases[4].n, 2048);
  EXPECT_EQ(cases[4].k, 16384);
  EXPECT_EQ(cases[4].flops(), 2.0 * 11264 * 2048 * 16384);
}

TEST(GpuCases, ComeForEveryHiddenSizeAndEveryRow) {
  const std::vector<GpuCase> cases = gpu_cases({});
  std::map<std::pair<int64_t, std::string_view>, int> counts;
  for (const GpuCase& product : cases) ++counts[{product.hidden, product.row->name}];
  EXPECT_EQ(counts.size(), 3 * gpu_rows().size());
  for (const int64_t hidden : {2048, 4096, 8192}) EXPECT_EQ((counts[{hidden, "loss"}]), 2);
}

TEST(GpuCases, AnUnknownRowIsNamedBesideThoseThereAre) {
  try {
    gpu_cases({.rows = {"store"}});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("store is not a row"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("store-tn, store-nn"), std::string::npos);
  }
}

GpuTimes times(std::vector<double> rounds, double mhz = 1500) {
  const size_t count = rounds.size();
  return {"", time_of(std::move(rounds)), std::vector<double>(count, mhz), std::vector<double>(count, 700)};
}

/// Two cases of one row whose ratios are 0.5 and 2, and one of another row that failed.
GpuReport report_of_three() {
  GpuReport report;
  report.machine.gpu = "NVIDIA H200";
  const std::vector<GpuCase> cases = gpu_cases({.hidden = {2048}, .rows = {"residual", "rope"}});
  report.results.push_back({.product = cases[0],
                            .errors = {{"h", 1.5e-3, 2.5e-3}},
                            .sustained = {times({1, 2, 9}), times({2, 4, 3}), times({1, 2, 9})},
                            .cool = {times({1}), times({1}), times({1})}});
  report.results.push_back({.product = cases[1],
                            .sustained = {times({2, 2, 2}), times({1, 1, 1}), times({1, 1, 1})},
                            .cool = {times({4}), times({1}), times({2})}});
  report.results.push_back({.product = cases[2], .failure = "qkv is wrong"});
  for (GpuResult& result : report.results)
    for (GpuRegime* regime : {&result.sustained, &result.cool})
      for (size_t i = 0; i < regime->size(); ++i) (*regime)[i].name = i == 0 ? "coda" : i == 1 ? "cublas" : "cublaslt";
  return report;
}

TEST(GpuReport_, MeansAreGeometricOverRatiosOfTheSameRound) {
  const GpuReport report = report_of_three();
  EXPECT_EQ(to_cublas(report.results[0].sustained), 0.5);  // of 0.5, 0.5, 3
  EXPECT_TRUE(std::isnan(to_cublas({})));
  const std::vector<GpuMean> means = gpu_means(report);
  ASSERT_EQ(means.size(), 1U);  // what failed has no figure
  EXPECT_EQ(means[0].row->name, "residual");
  EXPECT_EQ(means[0].cases, 2);
  EXPECT_DOUBLE_EQ(means[0].sustained, 1);
  EXPECT_DOUBLE_EQ(means[0].cool, 2);
  EXPECT_DOUBLE_EQ(means[0].sustained_best, std::sqrt(2));
  EXPECT_DOUBLE_EQ(means[0].worst, 2);
}

TEST(GpuReport_, TextHasFiguresBarsAndFailures) {
  const GpuReport report = report_of_three();
  EXPECT_NE(text_of(report.results[0]).find("0.500 (1.000)"), std::string::npos) << text_of(report.results[0]);
  EXPECT_NE(text_of(report.results[0]).find("h 1.50e-03 (2.50e-03)"), std::string::npos);
  EXPECT_EQ(text_of(report.results[0]).find("LARGER"), std::string::npos);
  EXPECT_NE(text_of(report.results[2]).find("qkv is wrong"), std::string::npos);
  GpuResult inaccurate = report.results[0];
  inaccurate.errors[0].coda = 3e-3;
  EXPECT_NE(text_of(inaccurate).find("LARGER"), std::string::npos);
  EXPECT_NE(gpu_means_table(report).find("1.000 (0.97) over"), std::string::npos) << gpu_means_table(report);
  EXPECT_EQ(gpu_means_table(report).find("met "), std::string::npos);
  EXPECT_EQ(gpu_means_table({}), "");
  EXPECT_NE(gpu_table_head(report, 2048).find("F = 5632"), std::string::npos);
  GpuMachine machine{.nvml = "libnvidia-ml.so.1 is not here"};
  EXPECT_NE(text_of(machine).find("unknown: libnvidia-ml.so.1 is not here"), std::string::npos);
}

TEST(GpuReport_, JsonHasEveryRound) {
  GpuReport report = report_of_three();
  report.results[0].sustained[0].mhz[1] = NAN;  // NVML did not answer
  const Json json = Json::parse(json_of(report));
  EXPECT_EQ(json["machine"]["gpu"], "NVIDIA H200");
  const Json& first = json["results"][0];
  EXPECT_EQ(first["row"], "residual");
  EXPECT_EQ(first["sustained"]["times"]["coda"]["rounds_s"], Json({1, 2, 9}));
  EXPECT_TRUE(first["sustained"]["times"]["coda"]["sm_mhz"][1].is_null());
  EXPECT_EQ(first["sustained"]["times"]["coda"]["median_mhz"], 1500);
  EXPECT_EQ(first["sustained"]["ratio_to_cublas"], 0.5);
  EXPECT_EQ(first["errors"]["h"]["coda"], 1.5e-3);
  EXPECT_EQ(json["results"][2]["failure"], "qkv is wrong");
  EXPECT_EQ(json["means"][0]["sustained_bar"], 0.97);
}

TEST(SampledProduct, IsTheOraclesInBothOrders) {
  constexpr int64_t kSamples = 3, kN = 300, kK = 70;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  Grid a(kSamples, kK);
  for (double& x : a.values) x = normal(random);
  Buffer<bf16> b(kN, kK), turned(kK, kN);
  for (int64_t i = 0; i < kN; ++i)
    for (int64_t k = 0; k < kK; ++k)
      b.matrix()(i, k) = turned.matrix()(k, i) = static_cast<bf16>(static_cast<float>(normal(random)));
  const Grid wanted = oracle::accumulators(a, oracle::elements(b.matrix()));
  Cpu cpu(2);
  for (const bool transposed : {false, true}) {
    const Grid got = sampled_product(cpu, a, transposed ? turned.matrix() : b.matrix(), transposed);
    ASSERT_EQ(got.values.size(), wanted.values.size());
    for (size_t i = 0; i < got.values.size(); ++i) ASSERT_NEAR(got.values[i], wanted.values[i], 1e-12) << i;
  }
}

// ---- the bf16 path

constexpr int64_t kRows = 5, kCols = 160;  // a group of 128 columns, and a part of one

/// Operands that live as long as the test.
class Bf16Path : public testing::Test {
 protected:
  Bf16Path() : acc_(kRows, kCols) {
    for (double& x : acc_.values) x = normal_(random_);
  }
  Matrix<const float> tile(int64_t cols) {
    std::vector<float>& values = floats_.emplace_back(static_cast<size_t>(kRows * cols));
    for (float& x : values) x = static_cast<float>(static_cast<bf16>(static_cast<float>(normal_(random_))));
    return {values.data(), kRows, cols};
  }
  Vector<const float> vector(int64_t size, double mean) {
    std::vector<float>& values = floats_.emplace_back(static_cast<size_t>(size));
    for (float& x : values) x = static_cast<float>(mean + 0.1 * normal_(random_));
    return {values.data(), size};
  }
  Vector<const int32_t> whole() const { return {whole_.data(), kRows}; }

  /// Every output is near the oracle's, and no nearer than rounding to bf16 allows.
  template <class P>
  void expect_bf16(const P& program, double limit = 8e-3) {
    const auto wanted = oracle::apply(acc_, program);
    const Grids got = bf16_path(acc_, program);
    ASSERT_EQ(got.size(), wanted.list.size());
    for (size_t o = 0; o < got.size(); ++o) {
      SCOPED_TRACE(std::string(wanted.list[o].name));
      const Grid& want = wanted.list[o].value;
      ASSERT_EQ(got[o].rows, want.rows);
      ASSERT_EQ(got[o].cols, want.cols);
      double apart = 0, size = 0;
      for (size_t i = 0; i < want.values.size(); ++i) {
        apart += (got[o].values[i] - want.values[i]) * (got[o].values[i] - want.values[i]);
        size += want.values[i] * want.values[i];
      }
      EXPECT_LT(std::sqrt(apart / size), limit);
      EXPECT_GT(std::sqrt(apart / size), 1e-6);
    }
  }

  std::mt19937_64 random_{1};
  std::normal_distribution<double> normal_;
  Grid acc_;
  std::deque<std::vector<float>> floats_;
  std::vector<int32_t> whole_ = {3, 77, 130, 159, 0};
};

TEST_F(Bf16Path, StoresAndSums) {
  expect_bf16(Store<HostSide>{});
  expect_bf16(Store<HostSide, float>{});
  std::vector<float> sums(kRows * kCols, 2);
  expect_bf16(AccumulateInto<HostSide>{.out = {sums.data(), kRows, kCols}});
  expect_bf16(Residual<HostSide>{.residual = tile(kCols)});
  expect_bf16(Residual<HostSide, GammaInEpilogue>{.residual = tile(kCols), .gamma = vector(kCols, 1)});
}

TEST_F(Bf16Path, ForwardPrograms) {
  const Vector<const float> r = vector(kRows, 1);
  expect_bf16(RmsNormSwiGlu<HostSide, KeepGateUp>{.inv_rms = r});
  expect_bf16(RmsNormSwiGlu<HostSide, DropGateUp>{.inv_rms = r});
  expect_bf16(RmsNormRope<HostSide>{
      .inv_rms = r, .position = whole(), .turns_high = vector(kCols / 2, 0.1), .turns_low = vector(kCols / 2, 0)});
  expect_bf16(CrossEntropy<HostSide, RecomputeLogits>{.inv_rms = r, .label = whole()});
  expect_bf16(CrossEntropy<HostSide, KeepLogits>{.inv_rms = r, .label = whole()});
}

TEST_F(Bf16Path, BackwardPrograms) {
  const Vector<const float> r = vector(kRows, 1);
  expect_bf16(SwiGluBackward<HostSide>{.inv_rms = r, .gate_up = tile(2 * kCols)});
  expect_bf16(RmsNormBackward<HostSide>{
      .inv_rms = r, .mean_dot = vector(kRows, 0.5), .h = tile(kCols), .d_residual = tile(kCols)});
  expect_bf16(CrossEntropyBackward<HostSide, RecomputeLogits>{.inv_rms = r,
                                                              .label = whole(),
                                                              .log_sum_exp = vector(kRows, 5.5),
                                                              .d_log_sum_exp = vector(kRows, 1),
                                                              .d_label_logit = vector(kRows, -1)},
              2e-2);
}

}  // namespace
}  // namespace coda::bench
