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
      return Bounded(Case<P>::stored(relative, ElementType::bfloat16, i, j)) +
             Bounded(Case<P>::stored(maxima, ElementType::float32, j / 128, i));
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
          }
        }
  }
};

TEST(CrossEntropy_, Products) {
  check_products<CrossEntropy<F>>(1);
  check_products<CrossEntropy<F, RecomputeLogits>>(2);
  check_products<CrossEntropy<B, RecomputeLogits>>(3);
  check_products<CrossEntropy<B>>(4, {}, FromTheStoredLogits{});
}
TEST(CrossEntropy_, Maps) {
  check_maps<CrossEntropy<F>>(5);
  check_maps<CrossEntropy<B, RecomputeLogits>>(6);
  check_maps<CrossEntropy<B>>(7, {}, FromTheStoredLogits{});
}

template <class P>
class CrossEntropyBackward_ : public testing::Test {};
using Backward = testing::Types<CrossEntropyBackward<F>, CrossEntropyBackward<B>,
                                CrossEntropyBackward<F, RecomputeLogits>, CrossEntropyBackward<B, RecomputeLogits>>;
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

/// d_logits is dL/dacc of the forward program, L = Σ d_loss·(lse − label's logit).
template <class Keep>
void backward_is_the_derivative() {
  Random random(12);
  constexpr int64_t kRows = 4, kVocabulary = 150;
  Case<CrossEntropy<F, Keep>> forward(kRows, kVocabulary, random);
  forward.template map<float>();
  for (int64_t i = 0; i < kRows; ++i)
    const_cast<int32_t&>(forward.program().label[i]) = static_cast<int32_t>(i * 37 + 5);
  forward.remember();
  std::vector<float> lse(kRows), d_loss(kRows);
  std::vector<float> logits(kRows * kVocabulary), maxima(2 * kRows);
  const auto value = forward.expected();
  for (int64_t i = 0; i < kRows; ++i) {
    const double a = value["log_sum_exp"].value(0, i).value, b = value["log_sum_exp"].value(1, i).value;
    lse[i] = static_cast<float>(std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b))));
    d_loss[i] = static_cast<float>(0.5 + i);
    for (int64_t j = 0; j < kVocabulary; ++j)
      if constexpr (Keep::value) {
        logits[i * kVocabulary + j] = static_cast<float>(value["relative_logits"].value(i, j).value);
        maxima[j / 128 * kRows + i] = static_cast<float>(value["maxima"].value(j / 128, i).value);
      } else {
        logits[i * kVocabulary + j] = static_cast<float>(forward.acc()(i, j).value);
      }
  }
  CrossEntropyBackward<F, Keep> program{.inv_rms = forward.program().inv_rms,
                                        .label = forward.program().label,
                                        .log_sum_exp = {lse.data(), kRows},
                                        .d_loss = {d_loss.data(), kRows}};
  if constexpr (Keep::value) program.maxima = {maxima.data(), 2, kRows};
  const auto gradient = oracle::map(Matrix<const float>(logits.data(), kRows, kVocabulary), program);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVocabulary; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      double slope = 0;
      for (int64_t slot = 0; slot < 2; ++slot) {
        const auto& part = moved["log_sum_exp"].value(slot, i);
        slope += std::exp(part.value - double(lse[i])) * part.slope[0] - moved["label_logit"].value(slot, i).slope[0];
      }
      EXPECT_NEAR(gradient["d_logits"].value(i, j), d_loss[i] * slope, 2e-6) << i << ", " << j;
    }
}
TEST(CrossEntropyGradient, IsTheDerivativeOfTheForwardProgram) {
  backward_is_the_derivative<KeepLogits>();
  backward_is_the_derivative<RecomputeLogits>();
}

}  // namespace
}  // namespace coda::test
