#include "coda/programs/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// The statistics take the logits as they are stored. Which of two bf16 values a logit is rounded to is open where it stands
/// between them, so the stored logits are held to one unit in their last place, and the statistics to what was stored.
template <class P>
void expect_of_the_stored_logits(AnyCase& c, oracle::Outputs<Bounded>& expected) {
  const auto& cap = static_cast<const Case<P>&>(c).program().f;
  Storage &relative = c.storage_of("relative_logits"), &maxima = c.storage_of("maxima");
  const int32_t* labels = c.storage_of("label").data<int32_t>();
  const auto logit = [&](int64_t i, int64_t j) {
    return cap(Bounded(AnyCase::stored(relative, ElementType::bfloat16, i, j)) +
               Bounded(AnyCase::stored(maxima, ElementType::float32, j / 128, i)));
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
          output.value(slot, i) = labels[i] >= begin && labels[i] < end ? logit(i, labels[i]) : Bounded(0);
        } else if (output.name == "logit_sum") {
          Bounded sum = 0;
          for (int64_t j = begin; j < end; ++j) sum = sum + logit(i, j);
          output.value(slot, i) = sum;
        }
      }
}

/// L = Σ over rows of d_lse·log Σ exp l + d_label·l[label] + d_sum·Σ l. dot is <dL/dx, x> of the logits before the cap.
template <class S, class Keep, class Cap, class LogitSum>
std::vector<Row> verify_cross_entropy(uint64_t seed) {
  using Forward = CrossEntropy<S, Keep, Cap, LogitSum>;
  using Grid = oracle::Grid<double>;
  constexpr int64_t kRows = 4, kVocabulary = 150;
  Random random(seed);
  Case<Forward> forward(kRows, kVocabulary, random);
  forward.template map<float>();
  if constexpr (std::is_same_v<Cap, SoftCapped>) forward.program().f.cap = 1.5f;  // where it bends
  Grid label(1, kRows), lse(1, kRows), d_lse(1, kRows), d_label(1, kRows), d_sum(1, kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    label(0, i) = static_cast<double>(i * 37 + 5);
    d_lse(0, i) = i == 2 ? 0 : 1.5 - static_cast<double>(i);
    d_label(0, i) = -0.75 * d_lse(0, i);
    d_sum(0, i) = LogitSum::value ? -0.125 * d_lse(0, i) : 0;
  }
  write(forward, {{"label", label}});
  const auto value = values(forward);
  for (int64_t i = 0; i < kRows; ++i) {
    const double a = value["log_sum_exp"].value(0, i), b = value["log_sum_exp"].value(1, i);
    lse(0, i) = std::max(a, b) + std::log1p(std::exp(-std::fabs(a - b)));
  }

  const auto d_acc = gradient(forward, [&](const auto& outputs, int64_t i) {
    double slope = 0;
    for (int64_t slot = 0; slot < 2; ++slot) {
      const auto& part = outputs["log_sum_exp"].value(slot, i);
      slope += d_lse(0, i) * std::exp(part.value - lse(0, i)) * part.slope[0] +
               d_label(0, i) * outputs["label_logit"].value(slot, i).slope[0];
      if constexpr (LogitSum::value) slope += d_sum(0, i) * outputs["logit_sum"].value(slot, i).slope[0];
    }
    return slope;
  });
  const Grid inv_rms = elements_of(forward, "inv_rms");
  Exact operands{{"inv_rms", inv_rms},
                 {"label", label},
                 {"log_sum_exp", lse},
                 {"d_log_sum_exp", d_lse},
                 {"d_label_logit", d_label}};
  if constexpr (LogitSum::value) operands["d_logit_sum"] = d_sum;
  if constexpr (Keep::value) operands["maxima"] = value["maxima"].value;
  Grid x(kRows, kVocabulary), dot(2, kRows);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVocabulary; ++j) {
      double logit = 0;
      if constexpr (Keep::value) {
        x(i, j) = value["relative_logits"].value(i, j);
        logit = x(i, j) + value["maxima"].value(j / 128, i);
      } else {
        x(i, j) = forward.acc()(i, j).value;
        logit = inv_rms(0, i) * x(i, j);
      }
      dot(j / 128, i) += d_acc(i, j) / inv_rms(0, i) * logit;
    }
  operands[kMapped] = x;
  Case<CrossEntropyBackward<S, Keep, Cap, LogitSum>> backward(kRows, kVocabulary, random);
  if constexpr (Keep::value)
    backward.template map<Element<S>>();
  else
    backward.template map<float>();
  backward.program().f = forward.program().f;
  return verify_derivative<Forward>(backward, operands, {{"d_logits", d_acc}, {"dot", dot}});
}

template <class S, class Keep, class Cap, class LogitSum>
void add_options(Programs& programs) {
  using Forward = CrossEntropy<S, Keep, Cap, LogitSum>;
  using Backward = CrossEntropyBackward<S, Keep, Cap, LogitSum>;
  if constexpr (Keep::value && std::is_same_v<Element<S>, bf16>)
    programs.add<Forward>({}, expect_of_the_stored_logits<Forward>);
  else
    programs.add<Forward>();
  if constexpr (Keep::value)
    programs.add<Backward>({{"d_logits", kMapped}});
  else
    programs.add<Backward>();
  add_derivative<Forward, Backward>(programs, verify_cross_entropy<S, Keep, Cap, LogitSum>);
}

template <class S>
void add(Programs& programs) {
  add_options<S, KeepLogits, Uncapped, WithoutLogitSum>(programs);
  add_options<S, KeepLogits, Uncapped, WithLogitSum>(programs);
  add_options<S, KeepLogits, SoftCapped, WithoutLogitSum>(programs);
  add_options<S, KeepLogits, SoftCapped, WithLogitSum>(programs);
  add_options<S, RecomputeLogits, Uncapped, WithoutLogitSum>(programs);
  add_options<S, RecomputeLogits, Uncapped, WithLogitSum>(programs);
  add_options<S, RecomputeLogits, SoftCapped, WithoutLogitSum>(programs);
  add_options<S, RecomputeLogits, SoftCapped, WithLogitSum>(programs);
}

}  // namespace

void add_cross_entropy(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
