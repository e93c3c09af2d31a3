// Troubles that users of other implementations of the vocabulary loss have had: one test each, with the numbers worked out by
// hand.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "coda/error.h"
#include "coda/loss.h"

namespace {

using namespace coda;

/// A head without a norm: h [M, K], weight [V, K]; gradients that are NaN until they are written.
template <class E = float>
struct Setting {
  int64_t m, vocab, k;
  std::vector<E> h, weight;
  std::vector<int32_t> label;
  std::vector<float> token_weight = {}, inv_rms = {};
  std::vector<E> d_h = std::vector<E>(h.size(), E(NAN));
  std::vector<float> d_weight = std::vector<float>(weight.size(), NAN);
  std::vector<float> loss = std::vector<float>(label.size(), NAN), z_loss = loss, log_sum_exp = loss;
  Cpu cpu{1};
  LinearCrossEntropy<E> criterion = {};

  LinearHead<E> head() const {
    return {.h = {h.data(), m, k},
            .inv_rms = {inv_rms.data(), static_cast<int64_t>(inv_rms.size())},
            .weight = {weight.data(), vocab, k},
            .label = {label.data(), m},
            .token_weight = {token_weight.data(), static_cast<int64_t>(token_weight.size())}};
  }
  TokenLosses tokens() {
    return {.loss = {loss.data(), m}, .z_loss = {z_loss.data(), m}, .log_sum_exp = {log_sum_exp.data(), m}};
  }
  LinearHeadGradients<E> gradients(bool add = false) {
    return {.d_h = {d_h.data(), m, k}, .d_weight = {d_weight.data(), vocab, k}, .add = add};
  }
  void poison() {
    d_h.assign(d_h.size(), E(NAN));
    d_weight.assign(d_weight.size(), NAN);
  }
  LossValue forward(const CrossEntropyOptions& options) { return criterion.forward(cpu, head(), options, tokens()); }
  void backward(const CrossEntropyOptions& options, const std::vector<float>& d_loss) {
    criterion.backward(cpu, head(), options, {log_sum_exp.data(), m},
                       {d_loss.data(), static_cast<int64_t>(d_loss.size())}, gradients());
  }
  LossValue both(const CrossEntropyOptions& options, const std::vector<float>& d_loss, bool add = false) {
    return criterion.forward_backward(cpu, head(), options, {d_loss.data(), static_cast<int64_t>(d_loss.size())},
                                      gradients(add), tokens());
  }
};

template <class T>
void expect_values(const std::vector<T>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(static_cast<double>(got[i]), want[i], tolerance) << i;
}
template <class T>
void expect_zeros(const std::vector<T>& got) {
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(static_cast<float>(got[i]), 0.f) << i;
}

/// The weight's gradient was scaled by the first token's upstream gradient.
TEST(LossTroubles, UpstreamGradientOfEachTokenReachesTheWeight) {
  Setting<> s{.m = 2, .vocab = 2, .k = 2, .h = {1, 0, 0, 1}, .weight = {1, 0, 0, 1}, .label = {0, 1}};
  const CrossEntropyOptions none{.reduction = Reduction::none};
  s.forward(none);
  s.backward(none, {1, 0});
  expect_values(s.d_weight, {-0.26894, 0, 0.26894, 0}, 5e-6);
  expect_values(s.d_h, {-0.26894, 0.26894, 0, 0}, 5e-6);
  // It was zero where the first token does not count.
  s.label[0] = kIgnoreIndex;
  s.forward(none);
  s.backward(none, {1, 1});
  expect_values(s.d_weight, {0, 0.26894, 0, -0.26894}, 5e-6);
}

/// 0/0 in the mean, or no gradient at all, so that sharded training hangs.
TEST(LossTroubles, AllTokensIgnored) {
  for (const bool norm : {false, true})
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      Setting<bf16> s{.m = 4,
                      .vocab = 3,
                      .k = 2,
                      .h = std::vector<bf16>(8, bf16(1.5f)),
                      .weight = std::vector<bf16>(6, bf16(0.5f)),
                      .label = std::vector<int32_t>(4, kIgnoreIndex)};
      if (norm) s.inv_rms.assign(4, 0.5f);
      const CrossEntropyOptions options{.reduction = reduction, .label_smoothing = 0.1, .z_loss = 0.1, .softcap = 2};
      const std::vector<float> upstream(reduction == Reduction::none ? 4 : 1, 1.f);
      for (const bool recompute : {false, true}) {
        s.poison();
        const LossValue value = recompute ? s.forward(options) : s.both(options, upstream);
        if (recompute) s.backward(options, upstream);
        expect_zeros(s.loss);
        EXPECT_EQ(value.sum, 0);
        if (reduction == Reduction::mean)
          EXPECT_TRUE(std::isnan(value.value()));
        else
          EXPECT_EQ(value.value(), 0);
        expect_zeros(s.d_h);
        expect_zeros(s.d_weight);
      }
    }
}

/// A mean of the micro-batches' means gives short ones too much weight: 2.5 in place of 1.6.
TEST(LossTroubles, MicroBatchesShareOneDivisor) {
  // Logits 0 and x with label 0: the loss is log(1 + e^x).
  const auto logit = [](double loss) { return static_cast<float>(std::log(std::expm1(loss))); };
  const auto batch = [&](int64_t counted, double loss) {
    Setting<> s{.m = counted + 1, .vocab = 2, .k = 1, .h = {}, .weight = {0, 1}, .label = {}};
    s.h.assign(counted + 1, logit(loss));
    s.label.assign(counted + 1, 0);
    s.label[1] = kIgnoreIndex;
    s.loss.resize(counted + 1);
    s.z_loss = s.log_sum_exp = s.loss;
    s.d_h.assign(counted + 1, NAN);
    return s.both({.divisor = 10}, {1}).value();
  };
  EXPECT_NEAR(batch(2, 4.0) + batch(8, 1.0), 1.6, 1e-6);
}

/// A gradient kept in bf16 stops growing at 256.
TEST(LossTroubles, AThousandTokensAndAThousandCallsAddUpExactly) {
  // p = 1/2 and h = 2: every token adds exactly −1 to the label's row and 1 to the other.
  Setting<bf16> s{.m = 1024,
                  .vocab = 2,
                  .k = 1,
                  .h = std::vector<bf16>(1024, bf16(2.f)),
                  .weight = std::vector<bf16>(2, bf16(0.f)),
                  .label = std::vector<int32_t>(1024, 0)};
  s.both({.reduction = Reduction::sum}, {1});
  expect_values(s.d_weight, {-1024, 1024}, 0);
  s.m = 1;
  for (int i = 0; i < 1024; ++i) s.both({.reduction = Reduction::sum}, {1}, i > 0);
  expect_values(s.d_weight, {-1024, 1024}, 0);
}

/// Columns past the vocabulary taken for logits of 0: 21.0986 with three of them.
TEST(LossTroubles, TailLanesAreNotLogitsOfZero) {
  Setting<> s{.m = 1, .vocab = 5, .k = 1, .h = {1}, .weight = std::vector<float>(5, -20.f), .label = {0}};
  for (const double smoothing : {0.0, 0.5}) {
    const CrossEntropyOptions options{.label_smoothing = smoothing};
    EXPECT_NEAR(s.forward(options).value(), 1.60944, 5e-6);  // log 5, whatever the mass's place
    EXPECT_NEAR(s.both(options, {1}).value(), 1.60944, 5e-6);
    const double rest = 0.2 - smoothing / 5;
    expect_values(s.d_weight, {rest - (1 - smoothing), rest, rest, rest, rest}, 1e-6);
  }
}

/// x·tanh(x/c) in place of c·tanh(x/c), or its derivative left out of the backward pass.
TEST(LossTroubles, SoftcapAndItsDerivative) {
  // The label's logit is 0, so that the loss is the capped logit and its derivative the cap's.
  Setting<> s{.m = 1, .vocab = 2, .k = 1, .h = {1}, .weight = {124, 0}, .label = {1}};
  const CrossEntropyOptions options{.softcap = 30};
  EXPECT_NEAR(s.forward(options).value(), 29.98459, 5e-6);
  s.backward(options, {1});
  EXPECT_NEAR(s.d_weight[0], 0.00102723, 2e-7);
  EXPECT_NEAR(s.both(options, {1}).value(), 29.98459, 5e-6);
  EXPECT_NEAR(s.d_weight[0], 0.00102723, 2e-7);
  EXPECT_NEAR(s.forward({}).value(), 124, 1e-5);
}

/// The z term added although it is off, or not to be had by itself.
TEST(LossTroubles, ZLossIsOffOrGivenByItself) {
  Setting<> s{.m = 1, .vocab = 2, .k = 1, .h = {1}, .weight = {0, 0}, .label = {0}};
  const LossValue off = s.both({}, {1});
  EXPECT_EQ(static_cast<float>(off.value()), static_cast<float>(std::log(2.0)));
  EXPECT_EQ(off.z_value(), 0);
  EXPECT_EQ(s.z_loss[0], 0);
  expect_values(s.d_weight, {-0.5, 0.5}, 0);

  const LossValue on = s.both({.z_loss = 0.1}, {1});
  EXPECT_NEAR(on.value(), 0.741192, 5e-7);
  EXPECT_NEAR(on.z_value(), 0.0480453, 5e-8);
  EXPECT_NEAR(s.z_loss[0], 0.0480453, 5e-8);
  EXPECT_NEAR(s.loss[0], 0.741192, 5e-7);
  expect_values(s.d_weight, {-0.430685, 0.569315}, 5e-7);
}

/// Smoothing together with ignored tokens: they add nothing, to the divisor neither.
TEST(LossTroubles, LabelSmoothingLeavesIgnoredTokensOut) {
  Setting<> s{.m = 2, .vocab = 4, .k = 1, .h = {1, 1}, .weight = {2, 0, 0, 0}, .label = {0, kIgnoreIndex}};
  const CrossEntropyOptions options{.label_smoothing = 0.1};
  EXPECT_NEAR(s.forward(options).value(), 0.490753, 5e-7);
  EXPECT_EQ(s.loss[1], 0);
  const std::vector<double> gradient = {-0.213765, 0.0712551, 0.0712551, 0.0712551};
  s.backward(options, {1});
  expect_values(s.d_weight, gradient, 1e-6);
  const LossValue value = s.both(options, {1});
  EXPECT_NEAR(value.value(), 0.490753, 5e-7);
  EXPECT_EQ(value.divisor, 1);
  expect_values(s.d_weight, gradient, 1e-6);
}

/// A loss of zero with a gradient that is not, or a read from anywhere.
TEST(LossTroubles, ALabelOutsideTheVocabularyIsNamed) {
  for (const int32_t wrong : {100, -5}) {
    Setting<> s{.m = 3,
                .vocab = 100,
                .k = 1,
                .h = {1, 1, 1},
                .weight = std::vector<float>(100, 0.5f),
                .label = {99, kIgnoreIndex, wrong}};
    const auto refused = [&](const auto& call) {
      try {
        call();
        ADD_FAILURE() << "label " << wrong << " was accepted";
      } catch (const OperandError& e) {
        EXPECT_EQ(std::string(e.what()), "label of row 2 is " + std::to_string(wrong) +
                                             "; it needs an id from 0 to 99, or -100 to be ignored");
      }
      for (const auto* written : {&s.d_h, &s.d_weight, &s.loss})
        for (float x : *written) ASSERT_TRUE(std::isnan(x)) << "an output was written";
    };
    refused([&] { s.forward({}); });
    refused([&] { s.both({}, {1}); });
    refused([&] { s.backward({}, {1}); });
    EXPECT_THROW(s.forward({.ignore_index = wrong}), OperandError);  // now −100 is the one that is wrong
  }
}

/// A second backward pass that fails or scales twice; inputs that are overwritten.
TEST(LossTroubles, BackwardTwiceAndInputsUntouched) {
  for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
    Setting<> s{.m = 3, .vocab = 4, .k = 2, .h = {1, -2, 0.5, 3, -1, 0.25}, .weight = {}, .label = {3, 0, 2}};
    s.weight = {0.5f, -1, 2, 0.125f, -0.75f, 1, 0.3f, 0.7f};
    s.d_weight.assign(8, NAN);
    const CrossEntropyOptions options{.reduction = reduction, .z_loss = 0.01};
    const size_t size = reduction == Reduction::none ? 3 : 1;
    const auto h = s.h, weight = s.weight;
    const auto label = s.label;
    s.forward(options);
    const auto log_sum_exp = s.log_sum_exp;
    s.backward(options, std::vector<float>(size, 1.f));
    const auto d_h = s.d_h, d_weight = s.d_weight;
    s.backward(options, std::vector<float>(size, 1.f));
    EXPECT_EQ(s.d_h, d_h);
    EXPECT_EQ(s.d_weight, d_weight);
    s.backward(options, std::vector<float>(size, 3.f));
    for (size_t i = 0; i < d_h.size(); ++i) EXPECT_NEAR(s.d_h[i], 3 * d_h[i], 1e-6) << i;
    for (size_t i = 0; i < d_weight.size(); ++i) EXPECT_NEAR(s.d_weight[i], 3 * d_weight[i], 1e-6) << i;
    EXPECT_EQ(s.h, h);
    EXPECT_EQ(s.weight, weight);
    EXPECT_EQ(s.label, label);
    EXPECT_EQ(s.log_sum_exp, log_sum_exp);
  }
}

}  // namespace
