// What coda bench rests on: that the libraries compute what coda does, and that turns are taken as it says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "bench/contest.h"
#include "bench/library.h"
#include "bench/rows.h"

namespace coda::bench {
namespace {

TEST(Measure, EveryEntryRunsInEveryRound) {
  int first = 0, second = 0;
  const std::vector<Time> times =
      measure({{"first", [&] { ++first; }}, {"second", [&] { ++second; }}}, {.count = 3, .seconds = 1e-4});
  ASSERT_EQ(times.size(), 2U);
  EXPECT_GE(first, 6);  // once to warm up and at least once for the clock
  EXPECT_GE(second, 6);
  for (const Time& time : times) {
    EXPECT_GT(time.low, 0);
    EXPECT_LE(time.low, time.median);
    EXPECT_LE(time.median, time.high);
  }
}

TEST(Measure, RatiosAreOfTheSameRound) {
  // The second round ran on a machine three times as slow.
  const Time a{2, 1, 6, {2, 6, 1}}, b{2, 2, 6, {2, 6, 2}};
  EXPECT_EQ(ratio(a, b), 1);
  EXPECT_EQ(ratio(b, {1, 1, 2, {1, 2, 1}}), 2);
}

TEST(Libraries, MultiplyInEveryForm) {
  constexpr int64_t kM = 37, kN = 150, kK = 300;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> a(kM * kK), b(kN * kK);
  for (auto* values : {&a, &b})
    for (float& x : *values) x = normal(random);
  Cpu cpu(2);
  OpenBlas openblas(2);
  Libxsmm libxsmm(cpu);
  for (const Form form : {Form::TN, Form::NN, Form::NT}) {
    SCOPED_TRACE(name(form));
    std::vector<float> blas(kM * kN, NAN), xsmm(kM * kN, NAN);
    openblas({form, kM, kN, kK, a.data(), b.data(), blas.data()});
    libxsmm({form, kM, kN, kK, a.data(), b.data(), xsmm.data()});
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t j = 0; j < kN; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < kK; ++k)
          sum += static_cast<double>(form == Form::NT ? a[k * kM + i] : a[i * kK + k]) *
                 static_cast<double>(form == Form::TN ? b[j * kK + k] : b[k * kN + j]);
        ASSERT_NEAR(blas[i * kN + j], sum, 1e-3) << i << ", " << j;
        ASSERT_NEAR(xsmm[i * kN + j], sum, 1e-3) << i << ", " << j;
      }
  }
}

TEST(Libraries, WithoutPyTorchThatIsSaid) {
  try {
    const TorchMm loaded("/nowhere/libtorch_cpu.so", 2);
    FAIL() << "loaded";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("/nowhere/libtorch_cpu.so cannot be loaded")) << e.what();
  }
}

TEST(Block_, ProgramsAgreeWithALibrarysProductAndAPass) {
  Cpu cpu(2);
  OpenBlas openblas(2);
  Libxsmm libxsmm(cpu);
  const Shape shape{.tokens = 50, .hidden = 64, .ffn = 104, .heads = 2, .kv_heads = 1, .vocab = 300};
  for (const llama::Dtype dtype : {llama::Dtype::fp32, llama::Dtype::bf16}) {
    const auto block = make_block(cpu, shape, dtype);
    int products = 0;
    for (const Row& row : block->rows()) {
      if (!row.plain) continue;
      ++products;
      for (Library* library : {static_cast<Library*>(&openblas), static_cast<Library*>(&libxsmm)})
        EXPECT_LE(block->difference(row, *library), dtype == llama::Dtype::fp32 ? 1e-5 : 1e-2)
            << row.name << " beside " << library->name();
    }
    EXPECT_EQ(products, 13);
  }
}

}  // namespace
}  // namespace coda::bench
