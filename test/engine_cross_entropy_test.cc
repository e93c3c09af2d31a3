// The programs of the vocabulary loss on the CPU engine against the oracle, and the backward one against the derivative of the
// forward.
#include "coda/programs/cross_entropy.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

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
