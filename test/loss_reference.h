// The loss of a linear head as its definition reads, in double, with its gradients; and the same with what lies between its
// operators rounded.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "coda/loss.h"

namespace reference {

using Doubles = std::vector<double>;

/// h [M, K] and weight [V, K], row-major.
struct Head {
  int64_t m, vocab, k;
  Doubles h, weight;
  std::vector<int32_t> label;
  Doubles token_weight;  // or empty
  bool norm = false;     // an RMSNorm in front, of eps 1e-6
};

struct Losses {
  Doubles loss, z_loss, log_sum_exp;  // [M]
  double value = 0;                   // by the reduction; Σ of none
  Doubles d_h, d_weight;
};

struct Exact {
  double operator()(double x) const { return x; }
};
/// What a chain of operators in bf16 stores between them.
struct InBf16 {
  double operator()(double x) const { return static_cast<double>(coda::bf16(static_cast<float>(x))); }
};

/// round: of the normalised input, the logits, their gradient, and the gradients of the input.
template <class Round = Exact>
Losses losses(const Head& p, const coda::CrossEntropyOptions& o, const Doubles& d_loss, Round round = {}) {
  const auto at = [](const auto& x, int64_t i) { return x[static_cast<size_t>(i)]; };
  Losses out{.loss = Doubles(p.label.size()),
             .z_loss = Doubles(p.label.size()),
             .log_sum_exp = Doubles(p.label.size()),
             .d_h = Doubles(p.h.size()),
             .d_weight = Doubles(p.weight.size())};
  const auto weight = [&](int64_t i) { return p.token_weight.empty() ? 1.0 : at(p.token_weight, i); };
  double divisor = 1;
  if (o.reduction == coda::Reduction::mean) {
    divisor = o.divisor.value_or(0);
    for (int64_t i = 0; i < p.m && !o.divisor; ++i)
      if (at(p.label, i) != o.ignore_index) divisor += weight(i);
  }
  const double v = static_cast<double>(p.vocab), eps = o.label_smoothing;
  for (int64_t i = 0; i < p.m; ++i) {
    double r = 1, sum_sq = 0;
    for (int64_t j = 0; j < p.k; ++j) sum_sq += at(p.h, i * p.k + j) * at(p.h, i * p.k + j);
    if (p.norm) r = 1 / std::sqrt(sum_sq / static_cast<double>(p.k) + 1e-6);
    Doubles x(static_cast<size_t>(p.k));
    for (int64_t j = 0; j < p.k; ++j)
      x[static_cast<size_t>(j)] = p.norm ? round(r * at(p.h, i * p.k + j)) : at(p.h, i * p.k + j);
    Doubles logit(static_cast<size_t>(p.vocab)), slope(logit.size(), 1);
    double sum = 0, all = 0;
    for (int64_t c = 0; c < p.vocab; ++c) {
      double l = 0;
      for (int64_t j = 0; j < p.k; ++j) l += at(x, j) * at(p.weight, c * p.k + j);
      l = round(l);
      if (o.softcap) {
        const double t = std::tanh(l / *o.softcap);
        l = round(*o.softcap * t);
        slope[static_cast<size_t>(c)] = 1 - t * t;
      }
      logit[static_cast<size_t>(c)] = l;
      sum += std::exp(l);
      all += l;
    }
    const double lse = std::log(sum);
    out.log_sum_exp[static_cast<size_t>(i)] = lse;
    const int32_t label = at(p.label, i);
    if (label == o.ignore_index) continue;
    // Cross-entropy with the target's distribution (1 − ε)·[c = label] + ε/V.
    double loss = 0;
    for (int64_t c = 0; c < p.vocab; ++c) loss -= ((c == label ? 1 - eps : 0) + eps / v) * (at(logit, c) - lse);
    out.z_loss[static_cast<size_t>(i)] = weight(i) * o.z_loss * lse * lse;
    out.loss[static_cast<size_t>(i)] = weight(i) * loss + at(out.z_loss, i);
    out.value += at(out.loss, i) / divisor;
    const double d = weight(i) * at(d_loss, o.reduction == coda::Reduction::none ? i : 0) / divisor;
    Doubles d_x(static_cast<size_t>(p.k));
    for (int64_t c = 0; c < p.vocab; ++c) {
      const double target = (c == label ? 1 - eps : 0) + eps / v, probability = std::exp(at(logit, c)) / sum;
      const double dl = round(d * at(slope, c) * (probability * (1 + 2 * o.z_loss * lse) - target));
      for (int64_t j = 0; j < p.k; ++j) {
        d_x[static_cast<size_t>(j)] += dl * at(p.weight, c * p.k + j);
        out.d_weight[static_cast<size_t>(c * p.k + j)] += dl * at(x, j);
      }
    }
    for (double& v : d_x) v = round(v);
    double dot = 0;
    for (int64_t j = 0; j < p.k; ++j) dot += at(d_x, j) * at(p.h, i * p.k + j);
    for (int64_t j = 0; j < p.k; ++j)
      out.d_h[static_cast<size_t>(i * p.k + j)] =
          p.norm ? round(r * at(d_x, j) - r * r * r * dot / static_cast<double>(p.k) * at(p.h, i * p.k + j))
                 : at(d_x, j);
  }
  return out;
}

}  // namespace reference
