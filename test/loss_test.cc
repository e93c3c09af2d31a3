// The loss of a linear head in chunks: against its definition in double with every option, where chunks and slots end, its
// memory, and what it refuses.
#include "coda/loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "coda/error.h"
#include "loss_reference.h"

namespace {

using namespace coda;

struct Problem {
  int64_t m, vocab, k;
  std::vector<float> h, inv_rms, w, token_weight;
  std::vector<int32_t> label;
  int64_t counted = 0;

  Problem(int64_t m_, int64_t vocab_, int64_t k_, float deviation) : m(m_), vocab(vocab_), k(k_) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < m * k; ++i) h.push_back(normal(random));
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += std::pow(static_cast<double>(h[static_cast<size_t>(i * k + j)]), 2);
      inv_rms.push_back(static_cast<float>(1 / std::sqrt(sum / static_cast<double>(k) + 1e-6)));
      label.push_back(i % 7 == 3 ? kIgnoreIndex : static_cast<int32_t>(random() % static_cast<unsigned>(vocab)));
      counted += label.back() != kIgnoreIndex;
      token_weight.push_back(0.25f * static_cast<float>(1 + i % 5));
    }
    // The last column's label too.
    label[0] = static_cast<int32_t>(vocab - 1);
    for (int64_t i = 0; i < vocab * k; ++i) w.push_back(deviation * normal(random));
  }
  LinearHead<float> head(bool norm = true, bool weighted = false) const {
    LinearHead<float> head{.h = {h.data(), m, k}, .weight = {w.data(), vocab, k}, .label = {label.data(), m}};
    if (norm) head.inv_rms = {inv_rms.data(), m};
    if (weighted) head.token_weight = {token_weight.data(), m};
    return head;
  }
  reference::Head definition(bool norm = true, bool weighted = false) const {
    reference::Head head{m, vocab, k, {h.begin(), h.end()}, {w.begin(), w.end()}, label, {}, norm};
    if (weighted) head.token_weight.assign(token_weight.begin(), token_weight.end());
    return head;
  }
};

void expect_near(const std::vector<float>& got, const std::vector<double>& want, int64_t cols, double tolerance,
                 const char* name) {
  double scale = 0, worst = -1;
  size_t where = 0;
  for (double x : want) scale = std::max(scale, std::fabs(x));
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - want[i]) / scale;
    if (!(error <= worst)) {
      worst = error;
      where = i;
    }
  }
  EXPECT_LE(worst, tolerance) << name << " row " << where / static_cast<size_t>(cols) << " column "
                              << where % static_cast<size_t>(cols);
}

/// forward, backward and forward_backward against the definition.
void expect_definition(const Problem& p, const CrossEntropyOptions& options, bool norm = true, bool weighted = false) {
  Cpu cpu(2);
  LinearCrossEntropy<float> loss;
  std::vector<float> d_loss{0.75f};
  if (options.reduction == Reduction::none)
    for (int64_t i = 0; i < p.m; ++i) d_loss.push_back(0.5f - 0.125f * static_cast<float>(i % 9));
  if (options.reduction == Reduction::none) d_loss.pop_back();
  const Vector<const float> upstream(d_loss.data(), static_cast<int64_t>(d_loss.size()));
  const auto want = losses(p.definition(norm, weighted), options, {d_loss.begin(), d_loss.end()});

  std::vector<float> each(p.label.size(), NAN), z(p.label.size(), NAN), lse(p.label.size(), NAN);
  const TokenLosses tokens{.loss = {each.data(), p.m}, .z_loss = {z.data(), p.m}, .log_sum_exp = {lse.data(), p.m}};
  const auto check_losses = [&](const LossValue& value) {
    EXPECT_NEAR(value.value(), want.value, 2e-6 * std::fabs(want.value));
    expect_near(each, want.loss, 1, 2e-6, "loss");
    expect_near(lse, want.log_sum_exp, 1, 1e-6, "log_sum_exp");
    double z_sum = 0;
    for (size_t i = 0; i < z.size(); ++i) {
      EXPECT_NEAR(z[i], want.z_loss[i], 2e-6 * want.z_loss[i]) << i;
      z_sum += want.z_loss[i];
    }
    EXPECT_NEAR(value.z_sum, z_sum, 2e-6 * z_sum);
  };
  std::vector<float> d_h(p.h.size(), NAN), d_w(p.w.size(), NAN);
  const LinearHeadGradients<float> gradients{.d_h = {d_h.data(), p.m, p.k}, .d_weight = {d_w.data(), p.vocab, p.k}};
  const auto check_gradients = [&] {
    expect_near(d_h, want.d_h, p.k, 3e-6, "d_h");
    expect_near(d_w, want.d_weight, p.k, 3e-6, "d_weight");
    d_h.assign(d_h.size(), NAN);
    d_w.assign(d_w.size(), NAN);
  };
  const LinearHead<float> head = p.head(norm, weighted);
  check_losses(loss.forward_backward(cpu, head, options, upstream, gradients, tokens));
  check_gradients();
  each.assign(each.size(), NAN);
  z.assign(z.size(), NAN);
  lse.assign(lse.size(), NAN);
  check_losses(loss.forward(cpu, head, options, tokens));
  loss.backward(cpu, head, options, {lse.data(), p.m}, upstream, gradients);
  check_gradients();
}

TEST(Loss, IsItsDefinitionWhereSlotsAndChunksEnd) {
  for (int64_t vocab : {5, 128, 129, 300}) {
    SCOPED_TRACE("vocabulary " + std::to_string(vocab));
    expect_definition({37, vocab, 16, 0.4f}, {.divisor = 31});
  }
  expect_definition({1, 257, 8, 0.4f}, {.reduction = Reduction::sum});
}

TEST(Loss, IsItsDefinitionWithEveryOption) {
  const Problem p(37, 300, 16, 0.4f);
  expect_definition(p, {.reduction = Reduction::none});
  expect_definition(p, {.reduction = Reduction::none, .label_smoothing = 0.1, .softcap = 2}, false, true);
  expect_definition(p, {.label_smoothing = 0.2}, true, true);
  expect_definition(p, {.reduction = Reduction::sum, .z_loss = 0.01}, false);
  expect_definition(p, {.softcap = 1.5}, true);
  Problem q = p;
  for (int32_t& label : q.label)
    if (label == kIgnoreIndex) label = 7;
  expect_definition(q, {.divisor = 100, .ignore_index = 7, .label_smoothing = 0.3, .z_loss = 0.1, .softcap = 1}, true,
                    true);
}

TEST(Loss, ChunksAddUp) {
  // 64 MB of logits hold 16 rows of this vocabulary: three chunks, the last of one row.
  const int64_t vocab = 1'000'000;
  ASSERT_EQ(LinearCrossEntropy<float>::chunk_tokens(vocab, 33), 16);
  expect_definition({33, vocab, 4, 0.4f}, {});
}

TEST(Loss, OneObjectServesDifferentSizes) {
  Cpu cpu(1);
  LinearCrossEntropy<float> loss;
  for (const auto& [m, vocab] : {std::pair<int64_t, int64_t>{3, 200}, {40, 200}, {5, 300}, {2, 10}}) {
    const Problem p(m, vocab, 8, 0.4f);
    const auto want = losses(p.definition(), {}, {1});
    EXPECT_NEAR(loss.forward(cpu, p.head(), {}).value(), want.value, 2e-6 * want.value);
  }
}

TEST(Loss, NoTokensWriteAGradientOfZero) {
  Cpu cpu(1);
  LinearCrossEntropy<float> loss;
  const std::vector<float> w(40, 1.f), one{1};
  std::vector<float> d_w(40, NAN);
  const LinearHead<float> head{.h = {nullptr, 0, 8}, .weight = {w.data(), 5, 8}};
  const LinearHeadGradients<float> gradients{.d_h = {nullptr, 0, 8}, .d_weight = {d_w.data(), 5, 8}};
  EXPECT_EQ(loss.forward_backward(cpu, head, {.reduction = Reduction::sum}, {one.data(), 1}, gradients).sum, 0);
  for (float x : d_w) EXPECT_EQ(x, 0);
}

// ---- what is refused

class LossFrontDoor : public testing::Test {
 protected:
  template <class E, class Call>
  void refused(const Call& call, const std::string& what) {
    try {
      call();
      ADD_FAILURE() << "accepted; it should be refused: " << what;
    } catch (const E& e) {
      EXPECT_EQ(std::string(e.what()), what);
    }
    for (const auto* written : {&d_h, &d_w, &each})
      for (float x : *written) ASSERT_TRUE(std::isnan(x)) << "an output was written";
  }
  LossValue run(const CrossEntropyOptions& options) {
    return loss.forward_backward(cpu, head, options, upstream, gradients, tokens);
  }

  Cpu cpu{1};
  LinearCrossEntropy<float> loss;
  Problem p{4, 20, 8, 0.4f};
  std::vector<float> one = std::vector<float>(4, 1.f), d_h = std::vector<float>(32, NAN),
                     d_w = std::vector<float>(160, NAN), each = std::vector<float>(4, NAN);
  LinearHead<float> head = p.head();
  Vector<const float> upstream{one.data(), 1};
  LinearHeadGradients<float> gradients{.d_h = {d_h.data(), 4, 8}, .d_weight = {d_w.data(), 20, 8}};
  TokenLosses tokens{.loss = {each.data(), 4}};
};

TEST_F(LossFrontDoor, Options) {
  refused<UsageError>([&] { run({.label_smoothing = 1.5}); }, "label_smoothing is 1.5; it needs to be from 0 to 1");
  refused<UsageError>([&] { run({.z_loss = -1}); }, "z_loss is -1; it needs to be 0 or more");
  refused<UsageError>([&] { run({.softcap = 0}); }, "softcap is 0; it needs to be positive, or absent for no cap");
  refused<UsageError>([&] { run({.divisor = 0}); }, "divisor is 0; it needs to be positive");
  refused<UsageError>([&] { run({.reduction = Reduction::sum, .divisor = 4}); },
                      "a divisor is given, but only the reduction mean divides");
}

TEST_F(LossFrontDoor, Shapes) {
  refused<OperandError>([&] { run({.reduction = Reduction::none}); },
                        "d_loss is 1 values; it needs 4 ([M]: the reduction is none)");
  upstream.size = 4;
  refused<OperandError>([&] { run({}); }, "d_loss is 4 values; it needs 1 (one value: the reduction is sum or mean)");
  upstream.size = 1;
  head.inv_rms.size = 3;
  refused<OperandError>([&] { run({}); }, "inv_rms is 3 values; it needs 4 ([M], or none)");
  head.inv_rms.size = 4;
  head.label.size = 3;
  refused<OperandError>([&] { run({}); }, "label is 3 values; it needs 4 ([M])");
  head.label = {nullptr, 4};
  refused<OperandError>([&] { run({}); }, "label is null; it needs memory for 4 values");
  head.label = {p.label.data(), 4};
  head.weight.cols = 7;
  refused<OperandError>([&] { run({}); }, "weight is [V, K] = 20x7; it needs the K = 8 of h");
  head.weight.cols = 8;
  gradients.d_weight.rows = 19;
  refused<OperandError>([&] { run({}); }, "d_weight is 19x8; it needs 20x8 ([V, K])");
  gradients.d_weight.rows = 20;
  tokens.loss.size = 2;
  refused<OperandError>([&] { run({}); }, "loss is 2 values; it needs 4 ([M], or none)");
}

TEST_F(LossFrontDoor, AGradientOverAnInput) {
  gradients.d_h.data = p.h.data();
  refused<OverlapError>([&] { run({}); }, "d_h is an output that shares memory with h; it needs memory of its own");
}

/// VmHWM or VmRSS of this process, in MB.
double memory_mb(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) / 1024;
  return NAN;
}

/// Memory that the loss of 4096 tokens over 128256 ids adds at its peak, forward and backward, in MB; checks the loss.
template <class E>
double added_memory() {
  const int64_t m = 4096, vocab = 128256, d = 128;
  Cpu cpu(2);
  const Problem p(m, vocab, d, 0.02f);
  const std::vector<E> h(p.h.begin(), p.h.end()), w(p.w.begin(), p.w.end());
  std::vector<E> d_h(p.h.size(), E(0.f));
  std::vector<float> d_w(p.w.size());
  const float one = 1;
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  const double before = memory_mb("VmRSS");
  LinearCrossEntropy<E> loss;
  const double sum = loss.forward_backward(cpu,
                                           {.h = {h.data(), m, d},
                                            .inv_rms = {p.inv_rms.data(), m},
                                            .weight = {w.data(), vocab, d},
                                            .label = {p.label.data(), m}},
                                           {.divisor = 1000}, {&one, 1},
                                           {.d_h = {d_h.data(), m, d}, .d_weight = {d_w.data(), vocab, d}})
                         .sum;
  // It was all computed: near log V for small weights.
  EXPECT_NEAR(sum / static_cast<double>(p.counted), std::log(static_cast<double>(vocab)), 0.05);
  const double added = memory_mb("VmHWM") - before;
  std::printf("%.0f MB at the peak; whole logits in float would be %.0f MB\n", added,
              4e-6 * static_cast<double>(m * vocab));
  return added;
}

TEST(Loss, AddsLittleMemory) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's memory is not the loss's";
#endif
  EXPECT_LE(added_memory<float>(), 300);
  EXPECT_LE(added_memory<bf16>(), 300);
}

}  // namespace
