// The programs of LayerNorm on the CPU engine against the oracle; all of them together against the plain definition and its
// derivatives.
#include "coda/finish.h"
#include "coda/programs/layer_norm.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

// ---- y = ((h − μ)·r ⊙ gamma + beta) Wᵀ + b, h = x + residual

constexpr int64_t kM = 5, kD = 150, kOut = 140;  // two slots of 128, the second not full, in both directions
constexpr double kEps = 1e-3;

template <class T>
using Values = std::vector<T>;

template <class T>
struct Parameters {
  Values<T> x, residual, gamma, beta, w, b;
};

/// Σ d_y·y by the definition.
template <class T>
T loss(const Parameters<T>& p, const Values<double>& d_y) {
  T total = 0.0;
  for (int64_t i = 0; i < kM; ++i) {
    Values<T> h;
    T mean = 0.0, variance = 0.0;
    for (int64_t j = 0; j < kD; ++j) {
      h.push_back(p.x[i * kD + j] + p.residual[i * kD + j]);
      mean = mean + h.back() / T(double(kD));
    }
    for (const T& v : h) variance = variance + (v - mean) * (v - mean) / T(double(kD));
    const T r = T(1.0) / sqrt(variance + T(kEps));
    for (int64_t o = 0; o < kOut; ++o) {
      T y = p.b[o];
      for (int64_t j = 0; j < kD; ++j) y = y + ((h[j] - mean) * r * p.gamma[j] + p.beta[j]) * p.w[o * kD + j];
      total = total + T(d_y[i * kOut + o]) * y;
    }
  }
  return total;
}

struct Random_ {
  std::mt19937_64 engine{3};
  Values<float> operator()(int64_t count, double scale, double mean = 0) {
    Values<float> v(static_cast<size_t>(count));
    for (float& x : v) x = static_cast<float>(mean + scale * normal(engine));
    return v;
  }
};

TEST(LayerNormAlgebra, IsTheDefinitionAndItsDerivatives) {
  Random_ random;
  Parameters<float> p{.x = random(kM * kD, 1, 0.7),
                      .residual = random(kM * kD, 1),
                      .gamma = random(kD, 0.3, 1),
                      .beta = random(kD, 0.3),
                      .w = random(kOut * kD, 0.1),
                      .b = random(kOut, 0.2)};
  const Values<float> d_y = random(kM * kOut, 1);
  const Values<double> upstream(d_y.begin(), d_y.end());
  Cpu& cpu = pool(2);

  // What a caller makes once per optimizer step.
  Values<float> folded(p.w.size()), col_sum(kOut), bias(kOut);
  for (int64_t o = 0; o < kOut; ++o) {
    double sum = 0, shift = p.b[o];
    for (int64_t j = 0; j < kD; ++j) {
      folded[o * kD + j] = p.w[o * kD + j] * p.gamma[j];
      sum += double(folded[o * kD + j]);
      shift += double(p.w[o * kD + j]) * double(p.beta[j]);
    }
    col_sum[o] = static_cast<float>(sum);
    bias[o] = static_cast<float>(shift);
  }
  const Matrix<const float> w(folded.data(), kOut, kD);

  Values<float> h(kM * kD), sums(2 * kM), deviations(2 * kM), mean(kM), inv_std(kM), y(kM * kOut);
  const Matrix<const float> h_view(h.data(), kM, kD);
  map(cpu, Matrix<const float>(p.x.data(), kM, kD),
      ResidualMoments<F>{.residual = {p.residual.data(), kM, kD},
                         .h = {h.data(), kM, kD},
                         .sum = {sums.data(), 2, kM},
                         .sq_deviation = {deviations.data(), 2, kM}});
  mean_inv_std(cpu, Matrix<float>(sums.data(), 2, kM), Matrix<float>(deviations.data(), 2, kM), kD, kEps,
               {mean.data(), kM}, {inv_std.data(), kM});
  const Vector<const float> mu(mean.data(), kM), r(inv_std.data(), kM), c(col_sum.data(), kOut),
      shift(bias.data(), kOut);
  gemm(cpu, h_view, w, LayerNorm<F>{.mean = mu, .inv_std = r, .col_sum = c, .bias = shift, .y = {y.data(), kM, kOut}});

  Values<float> d_scaled(kM * kOut), dot_c(2 * kM), dot(2 * kM), d_b(kOut), mean_gradient(kOut), t(kM), s(kM),
      d_h(kM * kD), d_folded(kOut * kD);
  map(cpu, Matrix<const float>(d_y.data(), kM, kOut),
      LayerNormUpstream<F>{.mean = mu,
                           .inv_std = r,
                           .col_sum = c,
                           .bias = shift,
                           .y = {y.data(), kM, kOut},
                           .d_y = {d_scaled.data(), kM, kOut},
                           .dot_col_sum = {dot_c.data(), 2, kM},
                           .dot = {dot.data(), 2, kM},
                           .d_bias = {d_b.data(), 1, kOut},
                           .mean_gradient = {mean_gradient.data(), 1, kOut}});
  mean_dot(cpu, Matrix<float>(dot_c.data(), 2, kM), kD, {t.data(), kM});
  mean_dot(cpu, Matrix<float>(dot.data(), 2, kM), kD, {s.data(), kM});
  const Matrix<const float> d_scaled_view(d_scaled.data(), kM, kOut);
  gemm(cpu, d_scaled_view, transpose(w),
       LayerNormBackward<F, StreamEnds>{.mean = mu,
                                        .inv_std = r,
                                        .mean_dot_col_sum = {t.data(), kM},
                                        .mean_dot = {s.data(), kM},
                                        .h = h_view,
                                        .d_h = {d_h.data(), kM, kD}});
  gemm(
      cpu, transpose(d_scaled_view), transpose(h_view),
      CentredWeightGradient<F>{.mean_gradient = {mean_gradient.data(), kOut}, .d_weight = {d_folded.data(), kOut, kD}});

  Values<float> d_w(kOut * kD);
  Values<double> d_gamma(kD), d_beta(kD);
  for (int64_t o = 0; o < kOut; ++o)
    for (int64_t j = 0; j < kD; ++j) {
      const size_t at = o * kD + j;
      d_w[at] = d_folded[at] * p.gamma[j] + d_b[o] * p.beta[j];
      d_gamma[j] += double(d_folded[at]) * double(p.w[at]);
      d_beta[j] += double(d_b[o]) * double(p.w[at]);
    }

  Parameters<double> q{.x = {p.x.begin(), p.x.end()},
                       .residual = {p.residual.begin(), p.residual.end()},
                       .gamma = {p.gamma.begin(), p.gamma.end()},
                       .beta = {p.beta.begin(), p.beta.end()},
                       .w = {p.w.begin(), p.w.end()},
                       .b = {p.b.begin(), p.b.end()}};
  double total = 0, size = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    total += upstream[i] * double(y[i]);
    size += std::fabs(upstream[i] * double(y[i]));
  }
  EXPECT_NEAR(total, loss(q, upstream), 1e-6 * size);

  // Along random directions, and along the gradient itself, where every element counts.
  const auto expect_gradient = [&](const char* name, auto member, const auto& got) {
    for (int trial = 0; trial < 3; ++trial) {
      Parameters<Dual<double>> duals;
      const auto copy = [](const Values<double>& from, Values<Dual<double>>& to) {
        to.assign(from.begin(), from.end());
      };
      copy(q.x, duals.x);
      copy(q.residual, duals.residual);
      copy(q.gamma, duals.gamma);
      copy(q.beta, duals.beta);
      copy(q.w, duals.w);
      copy(q.b, duals.b);
      double along = 0, length = 0, direction_length = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        const double direction = trial == 2 ? double(got[i]) : normal(random.engine);
        (duals.*member)[i].slope[0] = direction;
        along += direction * double(got[i]);
        length += double(got[i]) * double(got[i]);
        direction_length += direction * direction;
      }
      EXPECT_NEAR(along, loss(duals, upstream).slope[0], 2e-6 * std::sqrt(length * direction_length)) << name;
    }
  };
  expect_gradient("h", &Parameters<Dual<double>>::x, d_h);
  expect_gradient("w", &Parameters<Dual<double>>::w, d_w);
  expect_gradient("b", &Parameters<Dual<double>>::b, d_b);
  expect_gradient("gamma", &Parameters<Dual<double>>::gamma, d_gamma);
  expect_gradient("beta", &Parameters<Dual<double>>::beta, d_beta);
}

}  // namespace
}  // namespace coda::test
