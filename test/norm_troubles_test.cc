// Troubles that users of other implementations of norms have had: one test each, with the numbers worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "coda/finish.h"
#include "coda/gemm.h"
#include "coda/programs/layer_norm.h"
#include "coda/programs/norm.h"

namespace coda {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

/// The residual stream of one row, x + residual, its sums and r.
template <class E>
struct Stream {
  std::vector<E> h;
  std::vector<float> sum_sq;
  float inv_rms = NAN;

  Stream(const std::vector<E>& x, const std::vector<E>& residual, double eps)
      : h(x.size()), sum_sq((x.size() + 127) / 128) {
    Cpu cpu(1);
    const auto n = static_cast<int64_t>(x.size()), slots = static_cast<int64_t>(sum_sq.size());
    map(cpu, Matrix<const E>(x.data(), 1, n),
        Residual<Tensors<E>>{
            .residual = {residual.data(), 1, n}, .h = {h.data(), 1, n}, .sum_sq = {sum_sq.data(), slots, 1}});
    coda::inv_rms(cpu, Matrix<float>(sum_sq.data(), slots, 1), n, eps, {&inv_rms, 1});
  }
};

/// bf16 activations with a weight in bf16 or in float, any leading dimensions: NaN, or refused.
TEST(NormTroubles, Bf16ActivationsWithWeightsOfEitherType) {
  // [2, 4, 256] are 8 rows.
  constexpr int64_t kM = 8, kD = 256, kN = 16;
  Cpu cpu(2);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<bf16> x(kM * kD), zeros(kM * kD, bf16(0.f)), h(kM * kD), w(kN * kD), y(kM * kN);
  for (bf16& v : x) v = bf16(normal(random));
  for (bf16& v : w) v = bf16(0.1f * normal(random));
  const std::vector<float> w_float(w.begin(), w.end());
  std::vector<float> sum_sq(2 * kM), r(kM);
  map(cpu, Matrix<const bf16>(x.data(), kM, kD),
      Residual<B>{.residual = {zeros.data(), kM, kD}, .h = {h.data(), kM, kD}, .sum_sq = {sum_sq.data(), 2, kM}});
  inv_rms(cpu, Matrix<float>(sum_sq.data(), 2, kM), kD, 1e-6, {r.data(), kM});
  const auto expect_norm = [&](const auto& weight) {
    y.assign(y.size(), bf16(NAN));
    gemm(cpu, Matrix<const bf16>(h.data(), kM, kD), weight,
         RmsNorm<B>{.inv_rms = {r.data(), kM}, .y = {y.data(), kM, kN}});
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t o = 0; o < kN; ++o) {
        double sum = 0, square = 0;
        for (int64_t j = 0; j < kD; ++j) {
          sum += double(float(x[i * kD + j])) * double(float(w[o * kD + j]));
          square += double(float(x[i * kD + j])) * double(float(x[i * kD + j]));
        }
        const double want = sum / std::sqrt(square / kD + 1e-6);
        EXPECT_NEAR(float(y[i * kN + o]), want, std::fabs(want) / 256 + 1e-6) << i << ", " << o;
      }
  };
  expect_norm(Matrix<const bf16>(w.data(), kN, kD));
  expect_norm(Matrix<const float>(w_float.data(), kN, kD));
}

/// A weight's gradient summed in bf16 stays at 256.
TEST(NormTroubles, GammasGradientIsSummedInFloat) {
  constexpr int64_t kM = 1024, kD = 16, kSlots = kM / 64;
  Cpu cpu(2);
  const std::vector<bf16> ones(kM * kD, bf16(1.f));
  const std::vector<float> one(kM, 1.f), gamma(kD, 1.f), zero(kM, 0.f);
  std::vector<bf16> d_h(kM * kD);
  std::vector<float> partial(kSlots * kD), d_gamma(kD);
  map(cpu, Matrix<const bf16>(ones.data(), kM, kD),
      RmsNormBackward<B, StreamEnds, GammaInEpilogue>{.inv_rms = {one.data(), kM},
                                                      .mean_dot = {zero.data(), kM},
                                                      .h = {ones.data(), kM, kD},
                                                      .gamma = {gamma.data(), kD},
                                                      .d_h = {d_h.data(), kM, kD},
                                                      .d_gamma = {partial.data(), kSlots, kD}});
  total(cpu, Matrix<float>(partial.data(), kSlots, kD), {d_gamma.data(), kD});
  for (float x : d_gamma) EXPECT_EQ(x, 1024);
}

/// The residual's gradient joined before the norm's Jacobian.
TEST(NormTroubles, TheStreamsGradientComesThroughUnchanged) {
  constexpr int64_t kN = 40;
  Cpu cpu(1);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> h(kN), d_residual(kN), d_h(kN), zeros(kN, 0.f);
  for (int64_t i = 0; i < kN; ++i) {
    h[i] = normal(random);
    d_residual[i] = normal(random);
  }
  const float r = 0.7f, s = 0;
  map(cpu, Matrix<const float>(zeros.data(), 1, kN),
      RmsNormBackward<F>{.inv_rms = {&r, 1},
                         .mean_dot = {&s, 1},
                         .h = {h.data(), 1, kN},
                         .d_residual = {d_residual.data(), 1, kN},
                         .d_h = {d_h.data(), 1, kN}});
  EXPECT_EQ(d_h, d_residual);
}

/// The variance of the sum as it is stored, not as it was added: 1.0.
TEST(NormTroubles, TheMeanSquareIsOfTheSumBeforeItIsRounded) {
  constexpr size_t kN = 256;
  const Stream<bf16> s(std::vector<bf16>(kN, bf16(1.f)), std::vector<bf16>(kN, bf16(0x1p-8f)), 0);
  EXPECT_EQ(float(s.h[0]), 1);  // half way between two values, to the even one
  EXPECT_NEAR((s.sum_sq[0] + s.sum_sq[1]) / kN, 1.0078278, 5e-8);
  EXPECT_NEAR(s.inv_rms, 1 / std::sqrt(1.0078277587890625), 1e-7);
}

/// eps outside the root, left out, or rounded to half.
TEST(NormTroubles, EpsilonIsInsideTheRoot) {
  const auto normed = [](float x, double eps) {
    const std::vector<float> zeros(128, 0.f);
    const Stream<float> s(std::vector<float>(128, x), zeros, eps);
    Cpu cpu(1);
    std::vector<float> y(128);
    map(cpu, Matrix<const float>(s.h.data(), 1, 128), RmsNorm<F>{.inv_rms = {&s.inv_rms, 1}, .y = {y.data(), 1, 128}});
    return y[0];
  };
  EXPECT_NEAR(normed(1e-4f, 1e-6), 0.0995037, 5e-8);
  EXPECT_EQ(normed(0, 1e-6), 0);
}

/// A norm's weight that is its distance from 1: folded into the next product and in the epilogue it is the same.
TEST(NormTroubles, GammaPlusOneFoldedAndInTheEpilogue) {
  constexpr int64_t kD = 48, kN = 5;
  Cpu cpu(1);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(kD), residual(kD), gamma(kD), w(kN * kD), folded(kN * kD), h(kD), scaled(kD), sum_sq(1);
  for (auto* values : {&x, &residual, &gamma, &w})
    for (float& v : *values) v = 0.3f * normal(random);
  for (int64_t i = 0; i < kN * kD; ++i) folded[i] = w[i] * (1 + gamma[i % kD]);
  map(cpu, Matrix<const float>(x.data(), 1, kD),
      Residual<F, GammaPlusOneInEpilogue>{.residual = {residual.data(), 1, kD},
                                          .gamma = {gamma.data(), kD},
                                          .h = {h.data(), 1, kD},
                                          .x = {scaled.data(), 1, kD},
                                          .sum_sq = {sum_sq.data(), 1, 1}});
  float r = 0;
  inv_rms(cpu, Matrix<float>(sum_sq.data(), 1, 1), kD, 1e-6, {&r, 1});
  std::vector<float> y(kN), y_folded(kN);
  gemm(cpu, Matrix<const float>(scaled.data(), 1, kD), Matrix<const float>(w.data(), kN, kD),
       RmsNorm<F>{.inv_rms = {&r, 1}, .y = {y.data(), 1, kN}});
  gemm(cpu, Matrix<const float>(h.data(), 1, kD), Matrix<const float>(folded.data(), kN, kD),
       RmsNorm<F>{.inv_rms = {&r, 1}, .y = {y_folded.data(), 1, kN}});
  for (int64_t o = 0; o < kN; ++o) {
    double want = 0, square = 0;
    for (int64_t j = 0; j < kD; ++j) {
      const double v = double(x[j]) + double(residual[j]);
      want += v * (1 + double(gamma[j])) * double(w[o * kD + j]);
      square += v * v;
    }
    want /= std::sqrt(square / kD + 1e-6);
    EXPECT_NEAR(y[o], want, 2e-6);
    EXPECT_NEAR(y_folded[o], want, 2e-6);
  }
}

/// A variance from sums of squares: where the mean is a thousand deviations it has lost five of its seven digits.
TEST(NormTroubles, LayerNormsVarianceSurvivesALargeMean) {
  constexpr int64_t kD = 520;  // the last slot has 8 columns
  Cpu cpu(1);
  std::mt19937 random(4);
  std::normal_distribution<float> normal(1000, 1);
  std::vector<float> x(kD), zeros(kD, 0.f), h(kD), sums(5), deviations(5);
  double mean = 0, variance = 0;
  for (float& v : x) {
    v = normal(random);
    mean += double(v) / kD;
  }
  for (float v : x) variance += (double(v) - mean) * (double(v) - mean) / kD;
  map(cpu, Matrix<const float>(x.data(), 1, kD),
      ResidualMoments<F>{.residual = {zeros.data(), 1, kD},
                         .h = {h.data(), 1, kD},
                         .sum = {sums.data(), 5, 1},
                         .sq_deviation = {deviations.data(), 5, 1}});
  float mu = 0, r = 0;
  mean_inv_std(cpu, Matrix<float>(sums.data(), 5, 1), Matrix<float>(deviations.data(), 5, 1), kD, 1e-5, {&mu, 1},
               {&r, 1});
  EXPECT_NEAR(mu, mean, 1e-7 * mean);
  // A slot's sum is rounded to float, which moves the slots' means against each other by 1e-4 deviations.
  EXPECT_NEAR(r, 1 / std::sqrt(variance + 1e-5), 5e-6);

  // What the sum of squares has left of the variance.
  float sum = 0, sum_sq = 0;
  for (float v : x) {
    sum += v;
    sum_sq += v * v;
  }
  EXPECT_GT(std::fabs(sum_sq / kD - sum / kD * (sum / kD) - variance), 0.05);

  // And the normalised product: the mean costs ten of the accumulator's 24 bits.
  constexpr int64_t kN = 7;
  std::vector<float> w(kN * kD), col_sum(kN), bias(kN, 0.f), y(kN);
  std::normal_distribution<float> small(0, 0.05f);
  for (float& v : w) v = small(random);
  for (int64_t o = 0; o < kN; ++o) {
    double total = 0;
    for (int64_t j = 0; j < kD; ++j) total += double(w[o * kD + j]);
    col_sum[o] = static_cast<float>(total);
  }
  gemm(cpu, Matrix<const float>(h.data(), 1, kD), Matrix<const float>(w.data(), kN, kD),
       LayerNorm<F>{.mean = {&mu, 1},
                    .inv_std = {&r, 1},
                    .col_sum = {col_sum.data(), kN},
                    .bias = {bias.data(), kN},
                    .y = {y.data(), 1, kN}});
  for (int64_t o = 0; o < kN; ++o) {
    double want = 0;
    for (int64_t j = 0; j < kD; ++j) want += (double(x[j]) - mean) / std::sqrt(variance + 1e-5) * double(w[o * kD + j]);
    EXPECT_NEAR(y[o], want, 1000 * 0x1p-24 * 0.05 * kD) << o;
  }
}

/// An input changed by the call: a norm on float that works in its caller's memory.
TEST(NormTroubles, InputsStayAsTheyAreAndTwiceIsTheSame) {
  constexpr int64_t kN = 130;
  Cpu cpu(2);
  std::vector<float> x(kN), residual(kN), h(kN), sum_sq(2);
  for (int64_t i = 0; i < kN; ++i) {
    x[i] = static_cast<float>(i) / 7;
    residual[i] = static_cast<float>(i % 11) - 5;
  }
  const auto x_before = x, residual_before = residual;
  const auto run = [&] {
    map(cpu, Matrix<const float>(x.data(), 1, kN),
        Residual<F>{.residual = {residual.data(), 1, kN}, .h = {h.data(), 1, kN}, .sum_sq = {sum_sq.data(), 2, 1}});
  };
  run();
  const auto h_first = h, sum_first = sum_sq;
  run();
  EXPECT_EQ(x, x_before);
  EXPECT_EQ(residual, residual_before);
  EXPECT_EQ(h, h_first);
  EXPECT_EQ(sum_sq, sum_first);
}

}  // namespace
}  // namespace coda
