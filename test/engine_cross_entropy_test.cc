// The programs of the vocabulary loss on the CPU engine against the oracle, and the backward one against the derivative of the
// forward.
#include "coda/programs/cross_entropy.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

/// The statistics take the logits as they are stored. Which of two bf16 values a logit is rounded to is open where it stands
/// between them, so the stored logits are held to one unit in their last place, and the statistics to what was stored.
struct FromTheStoredLogits {
  template <class P>
  void operator()(Case<P>& c, oracle::Outputs<Bounded>& expected) const {
    Storage &relative = c.storage_of("relative_logits"), &maxima = c.storage_of("maxima");
    const auto logit = [&](int64_t i, int64_t j) {
      return c.program().f(Bounded(Case<P>::stored(relative, ElementType::bfloat16, i, j)) +
                           Bounded(Case<P>::stored(maxima, ElementType::float32, j / 128, i)));
    };
    for (auto& output : expected.list)
      for (int64_t slot = 0; slot < output.value.rows; ++slot)
        for (int64_t i = 0; i < output.value.cols; ++i) {
          const int64_t begin = slot * 128, end = std::min(begin + 128, c.n());
          if (output.name == "log_sum_exp") {
            Bounded top = logit(i, begin), sum = 0;
            for (int64_t j = begin; j < end; ++j) top = max(top, logit(i, j));
            for (int64_t j = begin; j < end; ++j) sum = sum + exp(logit(i, j) - top);
            output.maximum(slot, i) = top;
            output.value(slot, i) = top + log(sum);
          } else if (output.name == "label_logit") {
            const int64_t label = c.program().label[i];
            output.value(slot, i) = label >= begin && label < end ? logit(i, label) : Bounded(0);
          } else if (output.name == "logit_sum") {
            Bounded sum = 0;
            for (int64_t j = begin; j < end; ++j) sum = sum + logit(i, j);
            output.value(slot, i) = sum;
          }
        }
  }
};

template <class P>
class CrossEntropy_ : public testing::Test {};
using Forward = testing::Types<
    CrossEntropy<F>, CrossEntropy<F, KeepLogits, Uncapped, WithLogitSum>, CrossEntropy<F, KeepLogits, SoftCapped>,
    CrossEntropy<F, KeepLogits, SoftCapped, WithLogitSum>, CrossEntropy<F, RecomputeLogits>,
    CrossEntropy<B, RecomputeLogits>, CrossEntropy<F, RecomputeLogits, Uncapped, WithLogitSum>,
    CrossEntropy<B, RecomputeLogits, Uncapped, WithLogitSum>, CrossEntropy<F, RecomputeLogits, SoftCapped>,
    CrossEntropy<B, RecomputeLogits, SoftCapped>, CrossEntropy<F, RecomputeLogits, SoftCapped, WithLogitSum>,
    CrossEntropy<B, RecomputeLogits, SoftCapped, WithLogitSum>>;
TYPED_TEST_SUITE(CrossEntropy_, Forward);

TYPED_TEST(CrossEntropy_, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(CrossEntropy_, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

template <class P>
class CrossEntropyRounded : public testing::Test {};
using Rounded =
    testing::Types<CrossEntropy<B>, CrossEntropy<B, KeepLogits, Uncapped, WithLogitSum>,
                   CrossEntropy<B, KeepLogits, SoftCapped>, CrossEntropy<B, KeepLogits, SoftCapped, WithLogitSum>>;
TYPED_TEST_SUITE(CrossEntropyRounded, Rounded);

TYPED_TEST(CrossEntropyRounded, Products) {
  check_products<TypeParam>(seed_of<TypeParam>(), {}, FromTheStoredLogits{});
}
TYPED_TEST(CrossEntropyRounded, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>(), {}, FromTheStoredLogits{});
}

template <class P>
class CrossEntropyBackward_ : public testing::Test {};
using Backward = testing::Types<
    CrossEntropyBackward<F>, CrossEntropyBackward<B>, CrossEntropyBackward<F, KeepLogits, Uncapped, WithLogitSum>,
    CrossEntropyBackward<B, KeepLogits, Uncapped, WithLogitSum>, CrossEntropyBackward<F, KeepLogits, SoftCapped>,
    CrossEntropyBackward<B, KeepLogits, SoftCapped>, CrossEntropyBackward<F, KeepLogits, SoftCapped, WithLogitSum>,
    CrossEntropyBackward<B, KeepLogits, SoftCapped, WithLogitSum>, CrossEntropyBackward<F, RecomputeLogits>,
    CrossEntropyBackward<B, RecomputeLogits>, CrossEntropyBackward<F, RecomputeLogits, Uncapped, WithLogitSum>,
    CrossEntropyBackward<B, RecomputeLogits, Uncapped, WithLogitSum>,
    CrossEntropyBackward<F, RecomputeLogits, SoftCapped>, CrossEntropyBackward<B, RecomputeLogits, SoftCapped>,
    CrossEntropyBackward<F, RecomputeLogits, SoftCapped, WithLogitSum>,
    CrossEntropyBackward<B, RecomputeLogits, SoftCapped, WithLogitSum>>;
TYPED_TEST_SUITE(CrossEntropyBackward_, Backward);

TYPED_TEST(CrossEntropyBackward_, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(CrossEntropyBackward_, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

TEST(CrossEntropyInPlace, TheGradientOverwritesTheStoredLogits) {
  check_maps<CrossEntropyBackward<F>>(10, {.in_place = {{"d_logits", kMapped}}}, AsTheOracle{}, InPlaceOf<float>{});
  check_maps<CrossEntropyBackward<B>>(11, {.in_place = {{"d_logits", kMapped}}}, AsTheOracle{}, InPlaceOf<bf16>{});
}

/// d_logits is dL/dacc of the forward program, L any function of the statistics: its derivatives by them are given.
template <class Keep, class Cap, class LogitSum>
void backward_is_the_derivative() {
  Random random(12);
  constexpr int64_t kRows = 4, kVocabulary = 150;
  Case<CrossEntropy<F, Keep, Cap, LogitSum>> forward(kRows, kVocabulary, random);
  forward.template map<float>();
  if constexpr (std::is_same_v<Cap, SoftCapped>) forward.program().f.cap = 1.5f;  // where it bends
  for (int64_t i = 0; i < kRows; ++i)
    const_cast<int32_t&>(forward.program().label[i]) = static_cast<int32_t>(i * 37 + 5);
  forward.remember();
  std::vector<float> lse(kRows), d_lse(kRows), d_label(kRows), d_sum(kRows);
  std::vector<float> logits(kRows * kVocabulary), maxima(2 * kRows);
  const auto value = forward.expected();
  for (int64_t i = 0; i < kRows; ++i) {
    const double a = value["log_sum_exp"].value(0, i).value, b = value["log_sum_exp"].value(1, i).value;
    lse[i] = static_cast<float>(std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b))));
    d_lse[i] = static_cast<float>(0.5 + i);
    d_label[i] = static_cast<float>(-1 - 0.5 * i);
    d_sum[i] = LogitSum::value ? static_cast<float>(0.25 - 0.125 * i) : 0.f;
    for (int64_t j = 0; j < kVocabulary; ++j)
      if constexpr (Keep::value) {
        logits[i * kVocabulary + j] = static_cast<float>(value["relative_logits"].value(i, j).value);
        maxima[j / 128 * kRows + i] = static_cast<float>(value["maxima"].value(j / 128, i).value);
      } else {
        logits[i * kVocabulary + j] = static_cast<float>(forward.acc()(i, j).value);
      }
  }
  CrossEntropyBackward<F, Keep, Cap, LogitSum> program{.f = forward.program().f,
                                                       .inv_rms = forward.program().inv_rms,
                                                       .label = forward.program().label,
                                                       .log_sum_exp = {lse.data(), kRows},
                                                       .d_log_sum_exp = {d_lse.data(), kRows},
                                                       .d_label_logit = {d_label.data(), kRows}};
  if constexpr (LogitSum::value) program.d_logit_sum = {d_sum.data(), kRows};
  if constexpr (Keep::value) program.maxima = {maxima.data(), 2, kRows};
  const auto gradient = oracle::map(Matrix<const float>(logits.data(), kRows, kVocabulary), program);
  for (int64_t i = 0; i < kRows; ++i) {
    double dot = 0;
    for (int64_t j = 0; j < kVocabulary; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      double slope = 0;
      for (int64_t slot = 0; slot < 2; ++slot) {
        const auto& part = moved["log_sum_exp"].value(slot, i);
        slope += d_lse[i] * std::exp(part.value - double(lse[i])) * part.slope[0];
        slope += d_label[i] * moved["label_logit"].value(slot, i).slope[0];
        if constexpr (LogitSum::value) slope += d_sum[i] * moved["logit_sum"].value(slot, i).slope[0];
      }
      EXPECT_NEAR(gradient["d_logits"].value(i, j), slope, 4e-6) << i << ", " << j;
      dot += slope * forward.acc()(i, j).value;
    }
    EXPECT_NEAR(gradient["dot"].value(0, i) + gradient["dot"].value(1, i), dot, 2e-5) << i;
  }
}
TEST(CrossEntropyGradient, IsTheDerivativeOfTheForwardProgram) {
  backward_is_the_derivative<KeepLogits, Uncapped, WithoutLogitSum>();
  backward_is_the_derivative<KeepLogits, SoftCapped, WithLogitSum>();
  backward_is_the_derivative<RecomputeLogits, Uncapped, WithLogitSum>();
  backward_is_the_derivative<RecomputeLogits, SoftCapped, WithoutLogitSum>();
}

}  // namespace
}  // namespace coda::test
