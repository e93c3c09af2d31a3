// The vocabulary loss in chunks: against its definition in double where chunks and slots end, and its memory.
#include "llama/vocabulary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace coda;
using namespace coda::llama;

Config config_of(int64_t vocab, int64_t hidden) {
  Config c;
  c.vocab = vocab;
  c.hidden = hidden;
  return c;
}

struct Problem {
  int64_t m, vocab, d;
  std::vector<float> h, inv_rms, w;
  std::vector<int32_t> targets;
  int64_t counted = 0;

  Problem(int64_t m_, int64_t vocab_, int64_t d_, float deviation) : m(m_), vocab(vocab_), d(d_) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < m * d; ++i) h.push_back(normal(random));
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < d; ++j) sum += std::pow(static_cast<double>(h[static_cast<size_t>(i * d + j)]), 2);
      inv_rms.push_back(static_cast<float>(1 / std::sqrt(sum / static_cast<double>(d) + 1e-6)));
      targets.push_back(i % 7 == 3 ? kIgnored : static_cast<int32_t>(random() % static_cast<unsigned>(vocab)));
      counted += targets.back() != kIgnored;
    }
    // The last column's label too.
    targets[0] = static_cast<int32_t>(vocab - 1);
    for (int64_t i = 0; i < vocab * d; ++i) w.push_back(deviation * normal(random));
  }
  Stream<const float> stream() const { return {{h.data(), m, d}, {inv_rms.data(), m}}; }
  Matrix<const float> weight() const { return {w.data(), vocab, d}; }
  Vector<const int32_t> labels() const { return {targets.data(), m}; }
};

/// Loss and gradients by definition: d_h through the norm as well, d_w of the folded weight.
struct Definition {
  double loss = 0;
  std::vector<double> d_h, d_w;

  Definition(const Problem& p, double scale) : d_h(p.h.size()), d_w(p.w.size()) {
    const auto at = [](const auto& x, int64_t i) { return static_cast<double>(x[static_cast<size_t>(i)]); };
    for (int64_t i = 0; i < p.m; ++i) {
      double sum_sq = 0;
      for (int64_t j = 0; j < p.d; ++j) sum_sq += at(p.h, i * p.d + j) * at(p.h, i * p.d + j);
      const double r = 1 / std::sqrt(sum_sq / static_cast<double>(p.d) + 1e-6);
      if (p.targets[static_cast<size_t>(i)] == kIgnored) continue;
      std::vector<double> logit(static_cast<size_t>(p.vocab));
      double sum = 0;
      for (int64_t v = 0; v < p.vocab; ++v) {
        double& l = logit[static_cast<size_t>(v)];
        for (int64_t j = 0; j < p.d; ++j) l += r * at(p.h, i * p.d + j) * at(p.w, v * p.d + j);
        sum += std::exp(l);
      }
      loss += std::log(sum) - logit[static_cast<size_t>(p.targets[static_cast<size_t>(i)])];
      std::vector<double> d_x(static_cast<size_t>(p.d));
      for (int64_t v = 0; v < p.vocab; ++v) {
        const double dl =
            scale * (std::exp(logit[static_cast<size_t>(v)]) / sum - (v == p.targets[static_cast<size_t>(i)] ? 1 : 0));
        for (int64_t j = 0; j < p.d; ++j) {
          d_x[static_cast<size_t>(j)] += dl * at(p.w, v * p.d + j);
          d_w[static_cast<size_t>(v * p.d + j)] += dl * r * at(p.h, i * p.d + j);
        }
      }
      double dot = 0;
      for (int64_t j = 0; j < p.d; ++j) dot += d_x[static_cast<size_t>(j)] * at(p.h, i * p.d + j);
      for (int64_t j = 0; j < p.d; ++j)
        d_h[static_cast<size_t>(i * p.d + j)] =
            r * d_x[static_cast<size_t>(j)] - r * r * r * dot / static_cast<double>(p.d) * at(p.h, i * p.d + j);
    }
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

void expect_definition(int64_t m, int64_t vocab, int64_t d) {
  SCOPED_TRACE(std::to_string(m) + " tokens, vocabulary " + std::to_string(vocab));
  Cpu cpu(2);
  const Problem p(m, vocab, d, 0.4f);
  const Config config = config_of(vocab, d);
  VocabularyWorkspace<float> workspace(config, m);
  std::vector<float> d_h(p.h.size(), NAN), d_w(p.w.size(), NAN);
  const double scale = 1 / static_cast<double>(p.counted);
  const double loss =
      vocabulary_loss_backward<float>(cpu, config, p.stream(), p.weight(), p.labels(), static_cast<float>(scale),
                                      workspace, {d_h.data(), m, d}, {d_w.data(), vocab, d}, false);
  const Definition want(p, scale);
  EXPECT_NEAR(loss, want.loss, 1e-6 * want.loss);
  EXPECT_NEAR(vocabulary_loss<float>(cpu, config, p.stream(), p.weight(), p.labels(), workspace), want.loss,
              1e-6 * want.loss);
  expect_near(d_h, want.d_h, d, 3e-6, "d_h");
  expect_near(d_w, want.d_w, d, 3e-6, "d_w");
}

TEST(Vocabulary, IsItsDefinitionWhereSlotsAndChunksEnd) {
  for (int64_t vocab : {5, 128, 129, 300}) expect_definition(37, vocab, 16);
  expect_definition(1, 257, 8);
}

TEST(Vocabulary, ChunksAddUp) {
  // 64 MB of logits hold 16 rows of this vocabulary: three chunks, the last of one row.
  const int64_t vocab = 1'000'000;
  ASSERT_EQ(vocabulary_chunk(vocab, 33, sizeof(float)), 16);
  expect_definition(33, vocab, 8);
}

/// Columns past the vocabulary take no part (public case 5): with three lanes of zero it would be 21.0986.
TEST(Vocabulary, TailLanesAreNotLogitsOfZero) {
  Cpu cpu(1);
  const Config config = config_of(5, 8);
  const std::vector<float> h(8, 1), inv_rms(1, 1), w(40, -2.5f);
  const std::vector<int32_t> target{0};
  VocabularyWorkspace<float> workspace(config, 1);
  const double loss = vocabulary_loss<float>(cpu, config, {{h.data(), 1, 8}, {inv_rms.data(), 1}}, {w.data(), 5, 8},
                                             {target.data(), 1}, workspace);
  EXPECT_NEAR(loss, std::log(5.0), 1e-6);
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
  const Config config = config_of(vocab, d);
  std::vector<E> d_h(p.h.size(), E(0.f));
  std::vector<float> d_w(p.w.size());
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  const double before = memory_mb("VmRSS");
  VocabularyWorkspace<E> workspace(config, m);
  const double loss =
      vocabulary_loss_backward<E>(cpu, config, {{h.data(), m, d}, {p.inv_rms.data(), m}}, {w.data(), vocab, d},
                                  p.labels(), 1e-3f, workspace, {d_h.data(), m, d}, {d_w.data(), vocab, d}, false);
  // It was all computed: near log V for small weights.
  EXPECT_NEAR(loss / static_cast<double>(p.counted), std::log(static_cast<double>(vocab)), 0.05);
  const double added = memory_mb("VmHWM") - before;
  std::printf("%.0f MB at the peak; whole logits in float would be %.0f MB\n", added,
              4e-6 * static_cast<double>(m * vocab));
  return added;
}

TEST(Vocabulary, AddsLittleMemory) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's memory is not the loss's";
#endif
  EXPECT_LE(added_memory<float>(), 300);
  EXPECT_LE(added_memory<bf16>(), 300);
}

}  // namespace
