// One token's arithmetic, on every engine: its loss and the derivatives are functions of its row's statistics, in double.
#pragma once
#include <limits>

#include "coda/loss.h"

namespace coda::detail {

class TokenLoss {
 public:
  template <class E>
  TokenLoss(const LinearHead<E>& head, const CrossEntropyOptions& options)
      : labels_(head.label),
        weights_(head.token_weight),
        vocab_(head.weight.rows),
        ignored_(options.ignore_index),
        none_(options.reduction == Reduction::none),
        on_label_(1 - options.label_smoothing),
        on_each_(options.label_smoothing / static_cast<double>(head.weight.rows)),
        z_(options.z_loss) {}

  CODA_FN int64_t tokens() const { return labels_.size; }
  CODA_FN bool takes_logit_sum() const { return on_each_ > 0; }
  CODA_FN bool counts(int64_t token) const { return labels_[token] != ignored_; }
  /// Of a token that counts. NaN for a label that is no id, which the CPU refuses and a GPU sees only here: so are then its loss
  /// and its gradients.
  CODA_FN double weight(int64_t token) const {
    const int32_t label = labels_[token];
    if (label < 0 || label >= vocab_) return std::numeric_limits<double>::quiet_NaN();
    return weights_.size == 0 ? 1 : static_cast<double>(weights_[token]);
  }

  struct Loss {
    double all = 0, z = 0;
  };
  CODA_FN Loss loss(int64_t token, double log_sum_exp, double label_logit, double logit_sum) const {
    if (!counts(token)) return {};
    double loss = log_sum_exp - on_label_ * label_logit;
    if (takes_logit_sum()) loss -= on_each_ * logit_sum;
    const double z = z_ > 0 ? weight(token) * z_ * log_sum_exp * log_sum_exp : 0;
    return {.all = weight(token) * loss + z, .z = z};
  }

  /// dL/d(log-sum-exp), dL/d(label's logit), dL/d(sum of logits).
  struct Derivatives {
    float log_sum_exp = 0, label_logit = 0, logit_sum = 0;
  };
  CODA_FN Derivatives derivatives(int64_t token, double log_sum_exp, Vector<const float> d_loss, double divisor) const {
    if (!counts(token)) return {};
    const double d = weight(token) * static_cast<double>(d_loss[none_ ? token : 0]) / divisor;
    return {.log_sum_exp = static_cast<float>(d * (1 + 2 * z_ * log_sum_exp)),
            .label_logit = static_cast<float>(-d * on_label_),
            .logit_sum = static_cast<float>(-d * on_each_)};
  }

 private:
  Vector<const int32_t> labels_;
  Vector<const float> weights_;
  int64_t vocab_;
  int32_t ignored_;
  bool none_;
  double on_label_, on_each_, z_;
};

}  // namespace coda::detail
