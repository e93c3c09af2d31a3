// DESIGN section 5 in one place: a Llama block but attention, and the vocabulary loss, put together from the programs in float,
// against the plain definition in double and its gradients by central differences. Both forms of gamma.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"

namespace coda {
namespace {

// A head of 32, and v of 16 behind it, in one product.
constexpr int64_t kM = 6, kD = 32, kA = 24, kF = 24, kHead = 32, kQkv = kHead + 16, kVocabulary = 140;
constexpr double kEps = 1e-5;

/// A tensor of its own; T is double for the definition, float for the programs.
template <class T>
struct Tensor {
  int64_t rows, cols;
  std::vector<T> values;
  Tensor(int64_t rows_ = 0, int64_t cols_ = 0) : rows(rows_), cols(cols_), values(rows_ * cols_) {}
  T& operator()(int64_t i, int64_t j) { return values[i * cols + j]; }
  T operator()(int64_t i, int64_t j) const { return values[i * cols + j]; }
  Matrix<T> view() { return {values.data(), rows, cols}; }
  Matrix<const T> view() const { return {values.data(), rows, cols}; }
  Vector<const T> vector() const { return {values.data(), rows * cols}; }
};
using Doubles = Tensor<double>;
using Floats = Tensor<float>;

Floats to_float(const Doubles& x) {
  Floats y(x.rows, x.cols);
  for (size_t i = 0; i < x.values.size(); ++i) y.values[i] = static_cast<float>(x.values[i]);
  return y;
}

/// The block's parameters and inputs by name, and what its loss is made of.
struct Block {
  std::map<std::string, Doubles> x;
  Doubles d_qkv{kM, kQkv}, d_loss{1, kM};  // upstream gradients
  std::vector<int32_t> label, position;

  Block() {
    std::mt19937_64 random(1);
    const auto fill = [&](int64_t rows, int64_t cols, double scale, double mean = 0) {
      Doubles t(rows, cols);
      // Floats, so that both sides begin with the same numbers.
      for (double& v : t.values) v = static_cast<float>(mean + scale * std::normal_distribution<double>()(random));
      return t;
    };
    x["h0"] = fill(kM, kD, 1);
    x["a"] = fill(kM, kA, 1);
    x["wo"] = fill(kD, kA, 0.2);
    x["w_gate"] = fill(kF, kD, 0.2);
    x["w_up"] = fill(kF, kD, 0.2);
    x["w_down"] = fill(kD, kF, 0.2);
    x["w_qkv"] = fill(kQkv, kD, 0.2);
    x["w_lm"] = fill(kVocabulary, kD, 0.3);
    x["gamma_mlp"] = fill(1, kD, 0.3, 1);
    x["gamma_attention"] = fill(1, kD, 0.3, 1);
    x["gamma_final"] = fill(1, kD, 0.3, 1);
    d_qkv = fill(kM, kQkv, 0.5);
    d_loss = fill(1, kM, 0.3, 1);
    d_loss(0, 2) = 0;  // a token that does not count
    for (int64_t i = 0; i < kM; ++i) {
      label.push_back(static_cast<int32_t>(i * 23 + 7));
      position.push_back(static_cast<int32_t>(i < 4 ? i : 1000 * i));
    }
  }
};

// ---- the plain definition

Doubles linear(const Doubles& x, const Doubles& w) {
  Doubles y(x.rows, w.rows);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t o = 0; o < w.rows; ++o)
      for (int64_t k = 0; k < x.cols; ++k) y(i, o) += x(i, k) * w(o, k);
  return y;
}
Doubles rms_norm(const Doubles& h, const Doubles& gamma) {
  Doubles y(h.rows, h.cols);
  for (int64_t i = 0; i < h.rows; ++i) {
    double mean = 0;
    for (int64_t j = 0; j < h.cols; ++j) mean += h(i, j) * h(i, j) / static_cast<double>(h.cols);
    for (int64_t j = 0; j < h.cols; ++j) y(i, j) = h(i, j) / std::sqrt(mean + kEps) * gamma(0, j);
  }
  return y;
}
Doubles plus(Doubles x, const Doubles& y) {
  for (size_t i = 0; i < x.values.size(); ++i) x.values[i] += y.values[i];
  return x;
}
double frequency(int64_t pair) {
  return std::pow(10000.0, -2.0 * static_cast<double>(pair) / kHead);
}

/// Half-split rotary embedding, SwiGLU with separate gate and up, cross-entropy by log-sum-exp.
double loss(const Block& block) {
  const auto& x = block.x;
  const Doubles h1 = plus(linear(x.at("a"), x.at("wo")), x.at("h0"));
  const Doubles n1 = rms_norm(h1, x.at("gamma_mlp"));
  const Doubles gate = linear(n1, x.at("w_gate")), up = linear(n1, x.at("w_up"));
  Doubles y(kM, kF);
  for (size_t i = 0; i < y.values.size(); ++i)
    y.values[i] = gate.values[i] / (1 + std::exp(-gate.values[i])) * up.values[i];
  const Doubles h2 = plus(linear(y, x.at("w_down")), h1);
  const Doubles qkv = linear(rms_norm(h2, x.at("gamma_attention")), x.at("w_qkv"));
  const Doubles logits = linear(rms_norm(h2, x.at("gamma_final")), x.at("w_lm"));
  double total = 0;
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t p = 0; p < kHead / 2; ++p) {
      const double angle = block.position[i] * frequency(p), c = std::cos(angle), s = std::sin(angle);
      const double first = qkv(i, p), second = qkv(i, p + kHead / 2);
      total += block.d_qkv(i, p) * (first * c - second * s) + block.d_qkv(i, p + kHead / 2) * (second * c + first * s);
    }
    for (int64_t j = kHead; j < kQkv; ++j) total += block.d_qkv(i, j) * qkv(i, j);
    double sum = 0;
    for (int64_t v = 0; v < kVocabulary; ++v) sum += std::exp(logits(i, v));
    total += block.d_loss(0, i) * (std::log(sum) - logits(i, block.label[i]));
  }
  return total;
}

/// dloss/dx for every kApart-th element of the parameter x; the others stay NaN. Rows of 24 and 32 columns: every column has its turn.
constexpr size_t kApart = 5;
Doubles gradient(Block& block, const std::string& name) {
  Doubles& x = block.x.at(name);
  Doubles d(x.rows, x.cols);
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < x.values.size(); ++i) {
    d.values[i] = NAN;
    if (i % kApart != 0) continue;
    const double before = x.values[i];
    x.values[i] = before + kStep;
    const double above = loss(block);
    x.values[i] = before - kStep;
    d.values[i] = (above - loss(block)) / (2 * kStep);
    x.values[i] = before;
  }
  return d;
}

// ---- the programs

/// Where packed order takes each row of the plain one.
using Order = std::function<int64_t(int64_t)>;
int64_t packed_first(int64_t pair) {
  return pair / 8 * 16 + pair % 8;
}
int64_t packed_qkv(int64_t row) {
  if (row >= kHead) return row;
  return row < kHead / 2 ? packed_first(row) : packed_first(row - kHead / 2) + 8;
}
int64_t packed_gate(int64_t row) {
  return packed_first(row);
}
int64_t packed_up(int64_t row) {
  return packed_first(row) + 8;
}

void pack_rows(const Floats& plain, const Order& order, Floats& packed) {
  for (int64_t i = 0; i < plain.rows; ++i)
    for (int64_t j = 0; j < plain.cols; ++j) packed(order(i), j) = plain(i, j);
}
Floats unpack_rows(const Floats& packed, int64_t rows, const Order& order) {
  Floats plain(rows, packed.cols);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < packed.cols; ++j) plain(i, j) = packed(order(i), j);
  return plain;
}
int64_t slots(int64_t n) {
  return (n + 127) / 128;
}

Floats inv_rms(const Floats& sum_sq) {
  Floats r(1, sum_sq.cols);
  for (int64_t i = 0; i < sum_sq.cols; ++i) {
    float sum = 0;
    for (int64_t s = 0; s < sum_sq.rows; ++s) sum += sum_sq(s, i);
    r(0, i) = 1 / std::sqrt(sum / kD + static_cast<float>(kEps));
  }
  return r;
}
Floats mean(const Floats& dot) {  // s of RmsNormBackward
  Floats s(1, dot.cols);
  for (int64_t i = 0; i < dot.cols; ++i) {
    for (int64_t slot = 0; slot < dot.rows; ++slot) s(0, i) += dot(slot, i);
    s(0, i) /= kD;
  }
  return s;
}
Floats sum_rows(const Floats& partial) {
  Floats sum(1, partial.cols);
  for (int64_t i = 0; i < partial.rows; ++i)
    for (int64_t j = 0; j < partial.cols; ++j) sum(0, j) += partial(i, j);
  return sum;
}

/// The tables of section 5. Gamma: GammaFolded or GammaInEpilogue.
template <class Gamma>
class Programs {
  using F = Tensors<float>;
  static constexpr bool kFolded = !Gamma::value;

 public:
  Programs(const Block& block, int threads) : cpu_(threads), block_(block) {
    for (const auto& [name, value] : block.x) x_[name] = to_float(value);
    Floats gate_up(2 * kF, kD), qkv(kQkv, kD);
    pack_rows(x_["w_gate"], packed_gate, gate_up);
    pack_rows(x_["w_up"], packed_up, gate_up);
    pack_rows(x_["w_qkv"], packed_qkv, qkv);
    w_gate_up_ = fold(gate_up, "gamma_mlp");
    w_qkv_ = fold(qkv, "gamma_attention");
    w_lm_ = fold(x_["w_lm"], "gamma_final");
    unfolded_ = {{"w_gate_up", gate_up}, {"w_qkv", qkv}, {"w_lm", x_["w_lm"]}};
    for (int64_t p = 0; p < kQkv / 2; ++p) {
      const double turns = p < kHead / 2 ? frequency(p) / (2 * M_PI) : 0;
      turns_high_(0, p) = static_cast<float>(turns);
      turns_low_(0, p) = static_cast<float>(turns - turns_high_(0, p));
    }
  }

  double forward() {
    stream("F1", x_["a"], x_["wo"], x_["h0"], "gamma_mlp", h1_, x1_, r1_);
    gemm(cpu_, normed(h1_, x1_), w_gate_up_.view(),
         RmsNormSwiGlu<F>{.inv_rms = r1_.vector(), .gate_up = z_.view(), .y = y_.view()});
    stream("F3", y_, x_["w_down"], h1_, "gamma_attention", h2_, x2_, r2_);
    if (!kFolded) {  // the loss has a norm of its own on the same stream
      Floats again(kM, kD), r(1, kM);
      stream("F3", y_, x_["w_down"], h1_, "gamma_final", again, xf_, r);
    }
    gemm(cpu_, normed(h2_, x2_), w_qkv_.view(),
         RmsNormRope<F>{.inv_rms = r2_.vector(),
                        .position = positions(),
                        .turns_high = turns_high_.vector(),
                        .turns_low = turns_low_.vector(),
                        .qkv = qkv_.view()});
    std::vector<MaxSum> lse(slots(kVocabulary) * kM);
    Floats label_logit(slots(kVocabulary), kM);
    gemm(cpu_, normed(h2_, xf_), w_lm_.view(),
         CrossEntropy<F>{.inv_rms = r2_.vector(),
                         .label = labels(),
                         .maxima = maxima_.view(),
                         .relative_logits = logits_.view(),
                         .log_sum_exp = {lse.data(), slots(kVocabulary), kM},
                         .label_logit = label_logit.view()});
    double total = 0;
    for (int64_t i = 0; i < kM; ++i) {
      float top = -INFINITY, sum = 0, label = 0;
      for (int64_t s = 0; s < slots(kVocabulary); ++s) top = std::max(top, lse[s * kM + i].max);
      for (int64_t s = 0; s < slots(kVocabulary); ++s) {
        sum += lse[s * kM + i].sum * std::exp(lse[s * kM + i].max - top);
        label += label_logit(s, i);
      }
      lse_(0, i) = top + std::log(sum);
      total += block_.d_loss(0, i) * (double(lse_(0, i)) - label);
      for (int64_t j = 0; j < kQkv; ++j) total += block_.d_qkv(i, j) * qkv_(i, packed_qkv(j));
    }
    return total;
  }

  /// Gradients by the parameters' names.
  std::map<std::string, Floats> backward() {
    std::map<std::string, Floats> d;
    const Floats d_lse = to_float(block_.d_loss);  // the loss is the log-sum-exp less the label's logit
    Floats d_label(1, kM);
    for (int64_t i = 0; i < kM; ++i) d_label(0, i) = -d_lse(0, i);
    Floats dot_logits(slots(kVocabulary), kM), d_h2_loss(kM, kD), d_gamma(1, kD);
    map(cpu_, Matrix<const float>(logits_.view()),  // in place: B5
        CrossEntropyBackward<F>{.inv_rms = r2_.vector(),
                                .label = labels(),
                                .log_sum_exp = lse_.vector(),
                                .d_log_sum_exp = d_lse.vector(),
                                .d_label_logit = std::as_const(d_label).vector(),
                                .maxima = maxima_.view(),
                                .d_logits = logits_.view(),
                                .dot = dot_logits.view()});
    norm_backward<StreamEnds>(logits_, w_lm_, r2_, mean(dot_logits), h2_, nullptr, "gamma_final", d_h2_loss, d_gamma);
    weight(d, "w_lm", "gamma_final", logits_, normed(h2_, xf_), d_gamma);

    Floats d_qkv(kM, kQkv), dot_qkv(slots(kQkv), kM), d_h2(kM, kD);
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t j = 0; j < kQkv; ++j) d_qkv(i, packed_qkv(j)) = static_cast<float>(block_.d_qkv(i, j));
    map(cpu_, Matrix<const float>(d_qkv.view()),  // in place: B4
        RopeBackward<F>{.inv_rms = r2_.vector(),
                        .position = positions(),
                        .turns_high = turns_high_.vector(),
                        .turns_low = turns_low_.vector(),
                        .qkv = std::as_const(qkv_).view(),
                        .d_qkv = d_qkv.view(),
                        .dot = dot_qkv.view()});
    norm_backward<StreamJoins>(d_qkv, w_qkv_, r2_, mean(dot_qkv), h2_, &d_h2_loss, "gamma_attention", d_h2, d_gamma);
    weight(d, "w_qkv", "gamma_attention", d_qkv, normed(h2_, x2_), d_gamma);
    d["w_qkv"] = unpack_rows(d["w_qkv"], kQkv, packed_qkv);

    Floats d_z(kM, 2 * kF), y(kM, kF), dot_z(slots(kF), kM), d_h1(kM, kD);
    gemm(cpu_, std::as_const(d_h2).view(), transpose(std::as_const(x_["w_down"]).view()),
         SwiGluBackward<F>{.inv_rms = r1_.vector(),
                           .gate_up = std::as_const(z_).view(),
                           .d_gate_up = d_z.view(),
                           .y = y.view(),
                           .dot_z = dot_z.view()});
    // Micro-batches of 4 and 2 tokens add to one gradient.
    d["w_down"] = Floats(kD, kF);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 4}, {4, 2}})
      gemm(cpu_, transpose(std::as_const(d_h2).view().row_range(first, count)),
           transpose(std::as_const(y).view().row_range(first, count)), AccumulateInto<F>{.out = d["w_down"].view()});
    norm_backward<StreamJoins>(d_z, w_gate_up_, r1_, mean(dot_z), h1_, &d_h2, "gamma_mlp", d_h1, d_gamma);
    weight(d, "w_gate_up", "gamma_mlp", d_z, normed(h1_, x1_), d_gamma);
    d["w_gate"] = unpack_rows(d["w_gate_up"], kF, packed_gate);
    d["w_up"] = unpack_rows(d["w_gate_up"], kF, packed_up);
    d.erase("w_gate_up");

    d["a"] = Floats(kM, kA);
    gemm(cpu_, std::as_const(d_h1).view(), transpose(std::as_const(x_["wo"]).view()), Store<F>{.out = d["a"].view()});
    d["wo"] = outer(d_h1, std::as_const(x_["a"]).view());
    d["h0"] = d_h1;
    return d;
  }

 private:
  Floats fold(const Floats& w, const std::string& gamma) {
    Floats folded = w;
    if (kFolded)
      for (int64_t i = 0; i < w.rows; ++i)
        for (int64_t j = 0; j < w.cols; ++j) folded(i, j) *= x_[gamma](0, j);
    return folded;
  }
  /// The next product's operand: the stream itself, or gamma times it.
  static Matrix<const float> normed(const Floats& h, const Floats& x) { return kFolded ? h.view() : x.view(); }
  Vector<const int32_t> labels() const { return {block_.label.data(), kM}; }
  Vector<const int32_t> positions() const { return {block_.position.data(), kM}; }

  void stream(const char* row, const Floats& a, const Floats& w, const Floats& residual, const std::string& gamma,
              Floats& h, Floats& x, Floats& r) {
    SCOPED_TRACE(row);
    Floats sum_sq(slots(kD), kM);
    Residual<F, Gamma> program{};
    program.residual = residual.view();
    program.h = h.view();
    program.sum_sq = sum_sq.view();
    if constexpr (!kFolded) {
      program.gamma = x_[gamma].vector();
      program.x = x.view();
    }
    gemm(cpu_, a.view(), w.view(), program);
    r = inv_rms(sum_sq);
  }
  template <class Stream>
  void norm_backward(const Floats& d_y, const Floats& w, const Floats& r, const Floats& s, const Floats& h,
                     const Floats* d_residual, const std::string& gamma, Floats& d_h, Floats& d_gamma) {
    RmsNormBackward<F, Stream, Gamma> program{};
    program.inv_rms = r.vector();
    program.mean_dot = s.vector();
    program.h = h.view();
    program.d_h = d_h.view();
    Floats partial((kM + 63) / 64, kD);
    if constexpr (Stream::value) program.d_residual = d_residual->view();
    if constexpr (!kFolded) {
      program.gamma = x_[gamma].vector();
      program.d_gamma = partial.view();
    }
    gemm(cpu_, d_y.view(), transpose(w.view()), program);
    d_gamma = sum_rows(partial);
  }
  Floats outer(const Floats& d_y, Matrix<const float> x) {
    Floats d_w(d_y.cols, x.cols);
    gemm(cpu_, transpose(d_y.view()), transpose(x), Store<F>{.out = d_w.view()});
    return d_w;
  }
  /// The gradients of a weight behind a norm and of the norm's gamma.
  void weight(std::map<std::string, Floats>& d, const std::string& name, const std::string& gamma, const Floats& d_y,
              Matrix<const float> x, const Floats& d_gamma) {
    Floats d_w = outer(d_y, x);
    if (kFolded) {
      d[gamma] = Floats(1, kD);
      for (int64_t i = 0; i < d_w.rows; ++i)
        for (int64_t j = 0; j < kD; ++j) {
          d[gamma](0, j) += d_w(i, j) * unfolded_[name](i, j);
          d_w(i, j) *= x_[gamma](0, j);
        }
    } else {
      d[gamma] = d_gamma;
    }
    d[name] = d_w;
  }

  Cpu cpu_;
  const Block& block_;
  std::map<std::string, Floats> x_, unfolded_;
  Floats w_gate_up_, w_qkv_, w_lm_;
  Floats turns_high_{1, kQkv / 2}, turns_low_{1, kQkv / 2};
  Floats h1_{kM, kD}, h2_{kM, kD}, x1_{kM, kD}, x2_{kM, kD}, xf_{kM, kD}, r1_{1, kM}, r2_{1, kM};
  Floats z_{kM, 2 * kF}, y_{kM, kF}, qkv_{kM, kQkv};
  Floats logits_{kM, kVocabulary}, maxima_{slots(kVocabulary), kM}, lse_{1, kM};
};

template <class Gamma>
class Algebra : public testing::Test {};
using Gammas = testing::Types<GammaFolded, GammaInEpilogue>;
TYPED_TEST_SUITE(Algebra, Gammas);

TYPED_TEST(Algebra, TheProgramsAreTheBlock) {
  Block block;
  Programs<TypeParam> programs(block, 2);
  EXPECT_NEAR(programs.forward(), loss(block), 2e-5);
  const auto gradients = programs.backward();
  EXPECT_EQ(gradients.size(), block.x.size());
  for (const auto& [name, got] : gradients) {
    const Doubles want = gradient(block, name);
    double scale = 0, worst = 0;
    for (size_t i = 0; i < want.values.size(); i += kApart) scale = std::max(scale, std::fabs(want.values[i]));
    ASSERT_EQ(got.values.size(), want.values.size()) << name;
    size_t where = 0;
    for (size_t i = 0; i < want.values.size(); i += kApart) {
      const double off = std::fabs(got.values[i] - want.values[i]);
      if (!(off <= worst)) {
        worst = off;
        where = i;
      }
    }
    EXPECT_LE(worst, 3e-6 * scale) << name << " at row " << where / want.cols << ", column " << where % want.cols
                                   << " is " << got.values[where] << ", not " << want.values[where];
  }
}

}  // namespace
}  // namespace coda
