// Attention against its formulas in double precision, written out plainly below.
#include "llama/attention.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coda/error.h"
#include "cpu/isa.h"

namespace coda::llama {
namespace {

using Starts = std::vector<int64_t>;

/// A matrix in memory of its own that has guard columns to the right of every row; every element is NaN at first.
template <class E>
class Guarded {
 public:
  Guarded(int64_t rows, int64_t cols, int64_t guards = 5)
      : memory_(static_cast<size_t>(rows * (cols + guards)), E(kNan)),
        rows_(rows),
        cols_(cols),
        stride_(cols + guards) {}
  Matrix<E> view() { return {memory_.data(), rows_, cols_, stride_}; }
  Matrix<const E> view() const { return {memory_.data(), rows_, cols_, stride_}; }
  bool guards_untouched() const {
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t j = cols_; j < stride_; ++j)
        if (!std::isnan(static_cast<float>(memory_[static_cast<size_t>(i * stride_ + j)]))) return false;
    return true;
  }
  bool same_bits(const Guarded& other) const {
    for (int64_t i = 0; i < rows_; ++i)
      if (std::memcmp(view().row(i), other.view().row(i), static_cast<size_t>(cols_) * sizeof(E)) != 0) return false;
    return true;
  }
  void fill_normal(std::mt19937& random, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t i = 0; i < rows_; ++i)
      for (int64_t j = 0; j < cols_; ++j) view()(i, j) = E(normal(random));
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<E> memory_;
  int64_t rows_, cols_, stride_;
};

struct Doubles {
  Doubles(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_), values(static_cast<size_t>(rows * cols)) {}
  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * cols + j)]; }
  double operator()(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * cols + j)]; }
  double* at(int64_t i, int64_t j) { return &values[static_cast<size_t>(i * cols + j)]; }
  const double* at(int64_t i, int64_t j) const { return &values[static_cast<size_t>(i * cols + j)]; }
  int64_t rows, cols;
  std::vector<double> values;
};

template <class E>
Doubles to_doubles(Matrix<const E> matrix) {
  Doubles out(matrix.rows, matrix.cols);
  for (int64_t i = 0; i < matrix.rows; ++i)
    for (int64_t j = 0; j < matrix.cols; ++j) out(i, j) = double{static_cast<float>(matrix(i, j))};
  return out;
}

/// What attention is, in double precision. Beside every value stands what its rounding error grows with: the sum of the
/// magnitudes that it is made of.
struct Reference {
  /// The backward pass takes Δ from out as it was stored: in bf16 that is another value than the exact one.
  Reference(const AttentionShape& shape, const Starts& starts, const Doubles& qkv, const Doubles& stored_out,
            const Doubles& d_out)
      : out(qkv.rows, shape.query_width()),
        out_size(qkv.rows, shape.query_width()),
        log_sum_exp(shape.heads, qkv.rows),
        log_sum_exp_size(shape.heads, qkv.rows),
        d_qkv(qkv.rows, shape.qkv_width()),
        d_qkv_size(qkv.rows, shape.qkv_width()) {
    const int64_t dh = shape.head_dim;
    const double scale = 1 / std::sqrt(static_cast<double>(dh));
    for (size_t document = 0; document + 1 < starts.size(); ++document)
      for (int64_t head = 0; head < shape.heads; ++head)
        for (int64_t t = starts[document]; t < starts[document + 1]; ++t) {
          const int64_t first = starts[document], q_col = head * dh, kv_head = head / (shape.heads / shape.kv_heads);
          const int64_t k_col = shape.query_width() + kv_head * dh, v_col = k_col + shape.kv_width();
          const double* q = qkv.at(t, q_col);
          const double* g = d_out.at(t, q_col);

          std::vector<double> p;
          double top = -std::numeric_limits<double>::infinity(), sum = 0, largest = 0;
          for (int64_t u = first; u <= t; ++u) {
            const double* k = qkv.at(u, k_col);
            double s = 0, size = 0;
            for (int64_t i = 0; i < dh; ++i) s += q[i] * k[i], size += std::abs(q[i] * k[i]);
            p.push_back(s * scale);
            top = std::max(top, s * scale);
            largest = std::max(largest, size * scale);
          }
          for (double& s : p) sum += s = std::exp(s - top);
          for (double& s : p) s /= sum;
          log_sum_exp(head, t) = top + std::log(sum);
          log_sum_exp_size(head, t) = 1 + largest;
          // An error of a score is a relative error of its p, and reaches every p of the row through their sum.
          const double p_size = 1 + largest;

          double delta = 0, delta_size = 0;
          for (int64_t i = 0; i < dh; ++i) {
            const double term = g[i] * stored_out(t, q_col + i);
            delta += term;
            delta_size += std::abs(term);
          }
          for (int64_t u = first; u <= t; ++u) {
            const double p_u = p[static_cast<size_t>(u - first)];
            const double* k = qkv.at(u, k_col);
            const double* v = qkv.at(u, v_col);
            double* o = out.at(t, q_col);
            double* o_size = out_size.at(t, q_col);
            double* d_v = d_qkv.at(u, v_col);
            double* d_v_size = d_qkv_size.at(u, v_col);
            double d_p = 0, d_p_size = 0;
            for (int64_t i = 0; i < dh; ++i) {
              o[i] += p_u * v[i];
              o_size[i] += p_u * std::abs(v[i]) * p_size;
              d_p += g[i] * v[i];
              d_p_size += std::abs(g[i] * v[i]);
              d_v[i] += p_u * g[i];
              d_v_size[i] += p_u * std::abs(g[i]) * p_size;
            }
            const double d_s = p_u * (d_p - delta) * scale;
            const double d_s_size = (std::abs(d_s) * p_size + p_u * (d_p_size + delta_size) * scale);
            double* d_q = d_qkv.at(t, q_col);
            double* d_q_size = d_qkv_size.at(t, q_col);
            double* d_k = d_qkv.at(u, k_col);
            double* d_k_size = d_qkv_size.at(u, k_col);
            for (int64_t i = 0; i < dh; ++i) {
              d_q[i] += d_s * k[i];
              d_q_size[i] += d_s_size * std::abs(k[i]);
              d_k[i] += d_s * q[i];
              d_k_size[i] += d_s_size * std::abs(q[i]);
            }
          }
        }
  }

  Doubles out, out_size;                  // [M, heads·dh]
  Doubles log_sum_exp, log_sum_exp_size;  // [heads, M]
  Doubles d_qkv, d_qkv_size;              // [M, (heads + 2 kv_heads)·dh]
};

constexpr double kFloatUlp = 1.0 / (1 << 23);
constexpr double kUlps = 2;

/// Every element within kUlps of fp32 of its size, and half a unit of what it is stored in.
template <class E>
void expect_near(const char* name, const Guarded<E>& got, const Doubles& wanted, const Doubles& size) {
  ASSERT_TRUE(got.guards_untouched()) << name << ": a guard column was written";
  double worst = -1;
  int64_t row = 0, col = 0;
  for (int64_t i = 0; i < wanted.rows; ++i)
    for (int64_t j = 0; j < wanted.cols; ++j) {
      const double error = std::abs(double{static_cast<float>(got.view()(i, j))} - wanted(i, j));
      const double rounding = std::is_same_v<E, bf16> ? std::abs(wanted(i, j)) / 256 : 0;
      const double ratio = error / (rounding + kUlps * kFloatUlp * size(i, j) + 1e-30);
      if (!(ratio <= worst)) worst = ratio, row = i, col = j;
      if (std::isnan(ratio)) break;
    }
  EXPECT_LE(worst, 1) << name << ": worst at row " << row << ", column " << col << ": "
                      << static_cast<float>(got.view()(row, col)) << " for " << wanted(row, col) << ", of size "
                      << size(row, col);
}

std::string describe(const AttentionShape& shape, const Starts& starts) {
  std::string text = fmt::format("heads {}/{}, head_dim {}, documents", shape.heads, shape.kv_heads, shape.head_dim);
  for (size_t i = 1; i < starts.size(); ++i) text += fmt::format(" {}", starts[i] - starts[i - 1]);
  return text;
}

Starts starts_of(const std::vector<int64_t>& lengths) {
  Starts starts = {0};
  for (int64_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

template <class E>
struct Case {
  Case(const AttentionShape& shape_, const Starts& starts_, float deviation = 1, unsigned seed = 1)
      : shape(shape_),
        starts(starts_),
        tokens(starts.back()),
        qkv(tokens, shape.qkv_width()),
        d_out(tokens, shape.query_width(), 3),
        out(tokens, shape.query_width(), 7),
        log_sum_exp(shape.heads, tokens, 2),
        d_qkv(tokens, shape.qkv_width(), 4) {
    std::mt19937 random(seed);
    qkv.fill_normal(random, deviation);
    d_out.fill_normal(random, 1);
  }
  void run(Cpu& cpu) {
    const auto& in = qkv;
    attention_forward<E>(cpu, shape, starts, in.view(), out.view(), log_sum_exp.view());
    const auto& result = out;
    const auto& gradient = d_out;
    attention_backward<E>(cpu, shape, starts, in.view(), result.view(), gradient.view(), log_sum_exp.view(),
                          d_qkv.view());
  }
  Reference reference() const {
    return {shape, starts, to_doubles(qkv.view()), to_doubles(out.view()), to_doubles(d_out.view())};
  }
  void expect_as_in(const Reference& reference) const {
    expect_near("out", out, reference.out, reference.out_size);
    expect_near("log_sum_exp", log_sum_exp, reference.log_sum_exp, reference.log_sum_exp_size);
    expect_near("d_qkv", d_qkv, reference.d_qkv, reference.d_qkv_size);
  }

  AttentionShape shape;
  Starts starts;
  int64_t tokens;
  Guarded<E> qkv, d_out, out;
  Guarded<float> log_sum_exp;
  Guarded<E> d_qkv;
};

/// Runs a test body with every instruction set of this CPU.
class Attention : public ::testing::TestWithParam<cpu::Isa> {
 protected:
  void SetUp() override {
    before_ = cpu::chosen_isa();
    cpu::choose_isa(GetParam());
  }
  void TearDown() override { cpu::choose_isa(before_); }

  template <class E>
  void agrees(const AttentionShape& shape, const std::vector<int64_t>& lengths, float deviation = 1) {
    const Starts starts = starts_of(lengths);
    SCOPED_TRACE(describe(shape, starts));
    Case<E> c(shape, starts, deviation);
    c.run(cpu_);
    c.expect_as_in(c.reference());
  }

  Cpu cpu_{2};

 private:
  cpu::Isa before_;
};

constexpr AttentionShape kShapes[] = {
    {.heads = 1, .kv_heads = 1, .head_dim = 16},  {.heads = 4, .kv_heads = 4, .head_dim = 32},
    {.heads = 8, .kv_heads = 2, .head_dim = 48},  {.heads = 6, .kv_heads = 3, .head_dim = 64},
    {.heads = 8, .kv_heads = 1, .head_dim = 128}, {.heads = 5, .kv_heads = 1, .head_dim = 16}};

TEST_P(Attention, AgreesWithTheFormulas) {
  const std::vector<int64_t> documents[] = {{1}, {2}, {3, 2}, {15, 16, 17, 1}, {0, 31, 0, 0, 33, 0}, {127}, {129}};
  for (const AttentionShape& shape : kShapes)
    for (const auto& lengths : documents) {
      agrees<float>(shape, lengths);
      agrees<bf16>(shape, lengths);
    }
}

TEST_P(Attention, AgreesOverSeveralChunksOfKeys) {
  const struct {
    AttentionShape shape;
    std::vector<int64_t> lengths;
  } cases[] = {{{2, 1, 16}, {530, 40}}, {{2, 2, 128}, {300}}, {{1, 1, 128}, {5, 290}}, {{3, 1, 48}, {300}}};
  for (const auto& c : cases) {
    agrees<float>(c.shape, c.lengths);
    agrees<bf16>(c.shape, c.lengths);
  }
}

TEST_P(Attention, LargeScoresStayFinite) {
  // Scores of about ±1e4: softmax picks one key, and p is a few thousandths off for the rounding of the score alone.
  agrees<float>({.heads = 4, .kv_heads = 2, .head_dim = 32}, {150, 7}, 60);
  agrees<bf16>({.heads = 4, .kv_heads = 2, .head_dim = 32}, {150, 7}, 60);
}

TEST_P(Attention, SameBitsForAnyNumberOfThreads) {
  for (const AttentionShape shape : {AttentionShape{4, 2, 32}, AttentionShape{1, 1, 128}, AttentionShape{5, 1, 16}}) {
    const Starts starts = starts_of({700, 1, 0, 90, 33});
    SCOPED_TRACE(describe(shape, starts));
    Cpu one(1);
    Case<float> f(shape, starts);
    Case<bf16> h(shape, starts);
    f.run(one);
    h.run(one);
    for (const int threads : {1, 2, 3, 5, 5}) {
      Cpu several(threads);
      Case<float> f_again(shape, starts);
      Case<bf16> h_again(shape, starts);
      f_again.run(several);
      h_again.run(several);
      EXPECT_TRUE(f.out.same_bits(f_again.out)) << threads << " threads";
      EXPECT_TRUE(f.log_sum_exp.same_bits(f_again.log_sum_exp)) << threads << " threads";
      EXPECT_TRUE(f.d_qkv.same_bits(f_again.d_qkv)) << threads << " threads";
      EXPECT_TRUE(h.out.same_bits(h_again.out)) << threads << " threads";
      EXPECT_TRUE(h.d_qkv.same_bits(h_again.d_qkv)) << threads << " threads";
    }
  }
}

TEST_P(Attention, WithoutLogSumExpTheOutputIsTheSame) {
  Case<float> c({4, 2, 32}, starts_of({40, 3}));
  c.run(cpu_);
  Guarded<float> out(c.tokens, c.shape.query_width(), 7);
  const auto& in = c.qkv;
  attention_forward<float>(cpu_, c.shape, c.starts, in.view(), out.view(), {});
  EXPECT_TRUE(out.same_bits(c.out));
}

template <class E>
void decode_agrees(Cpu& cpu, const AttentionShape& shape, int64_t tokens) {
  SCOPED_TRACE(describe(shape, {0, tokens}));
  Case<E> c(shape, {0, tokens});
  c.run(cpu);
  const auto& in = c.qkv;
  const Matrix<const E> qkv = in.view();
  Guarded<E> out(1, shape.query_width());
  attention_decode<E>(cpu, shape, qkv.row(tokens - 1), qkv.col_range(shape.query_width(), shape.kv_width()),
                      qkv.col_range(shape.query_width() + shape.kv_width(), shape.kv_width()), out.view().data);
  Doubles wanted(1, shape.query_width()), size(1, shape.query_width());
  const Reference reference = c.reference();
  for (int64_t j = 0; j < wanted.cols; ++j) {
    wanted(0, j) = reference.out(tokens - 1, j);
    size(0, j) = reference.out_size(tokens - 1, j);
  }
  expect_near("out", out, wanted, size);
  if constexpr (std::is_same_v<E, float>) {
    for (int64_t j = 0; j < wanted.cols; ++j) wanted(0, j) = double{c.out.view()(tokens - 1, j)};
    expect_near("out against the last row of the forward pass", out, wanted, size);
  }
}

TEST_P(Attention, OneTokenIsTheLastRowOfTheForwardPass) {
  for (const AttentionShape& shape : kShapes)
    for (const int64_t tokens : {1, 2, 64, 130}) {
      decode_agrees<float>(cpu_, shape, tokens);
      decode_agrees<bf16>(cpu_, shape, tokens);
    }
}

TEST_P(Attention, NoTokens) {
  const AttentionShape shape{4, 2, 32};
  for (const Starts& starts : {Starts{0}, Starts{0, 0, 0}}) {
    Case<float> c(shape, starts);
    EXPECT_NO_THROW(c.run(cpu_));
    const Matrix<const float> qkv(nullptr, 0, shape.qkv_width());
    EXPECT_NO_THROW(attention_forward<float>(cpu_, shape, starts, qkv, {nullptr, 0, shape.query_width()}, {}));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, Attention, ::testing::ValuesIn(cpu::instruction_sets()),
                         [](const auto& isa) { return std::string(cpu::name(isa.param)); });

// ---- refusals -----------------------------------------------------------------------------------------------------------

/// Calls f, which must refuse the operand and write nothing.
template <class F>
void expect_refused(Case<float>& c, const std::string& operand, const F& f) {
  try {
    f();
    ADD_FAILURE() << operand << " was not refused";
  } catch (const OperandError& error) {
    EXPECT_EQ(error.operand(), operand) << error.what();
    EXPECT_FALSE(error.needs().empty());
  }
  const Case<float> untouched(c.shape, c.starts);
  for (int64_t i = 0; i < c.tokens; ++i)
    EXPECT_TRUE(std::isnan(c.out.view()(i, 0)) && std::isnan(c.d_qkv.view()(i, 0)));
}

TEST(AttentionRefusals, NameTheOperand) {
  Cpu cpu(1);
  Case<float> c({4, 2, 32}, {0, 3, 10});
  const auto forward = [&](AttentionShape shape, const Starts& starts, Matrix<const float> qkv, Matrix<float> out,
                           Matrix<float> lse) { attention_forward<float>(cpu, shape, starts, qkv, out, lse); };
  const Matrix<const float> qkv = c.qkv.view();
  const Matrix<float> out = c.out.view(), lse = c.log_sum_exp.view();
  expect_refused(c, "shape", [&] { forward({4, 3, 32}, c.starts, qkv, out, lse); });
  expect_refused(c, "shape", [&] { forward({0, 2, 32}, c.starts, qkv, out, lse); });
  expect_refused(c, "shape", [&] { forward({4, 0, 32}, c.starts, qkv, out, lse); });
  expect_refused(c, "shape", [&] { forward({4, 2, 24}, c.starts, qkv, out, lse); });
  expect_refused(c, "qkv", [&] { forward({4, 4, 32}, c.starts, qkv, out, lse); });
  expect_refused(c, "qkv", [&] { forward(c.shape, c.starts, {nullptr, 10, 256}, out, lse); });
  expect_refused(c, "qkv", [&] { forward(c.shape, c.starts, {qkv.data, 10, 256, 255}, out, lse); });
  expect_refused(c, "out", [&] { forward(c.shape, c.starts, qkv, out.row_range(0, 9), lse); });
  expect_refused(c, "out", [&] { forward(c.shape, c.starts, qkv, out.col_range(0, 127), lse); });
  expect_refused(c, "log_sum_exp", [&] { forward(c.shape, c.starts, qkv, out, lse.row_range(0, 3)); });
  for (const Starts& starts : {Starts{}, Starts{1, 10}, Starts{0, 5, 4, 10}, Starts{0, 9}, Starts{0, 11}, Starts{0}})
    expect_refused(c, "document_starts", [&] { forward(c.shape, starts, qkv, out, lse); });

  const auto backward = [&](Matrix<const float> o, Matrix<const float> d_o, Matrix<const float> l,
                            Matrix<float> d_qkv) {
    attention_backward<float>(cpu, c.shape, c.starts, qkv, o, d_o, l, d_qkv);
  };
  const Matrix<float> d_out = c.d_out.view(), d_qkv = c.d_qkv.view();
  expect_refused(c, "out", [&] { backward(out.col_range(0, 64), d_out, lse, d_qkv); });
  expect_refused(c, "d_out", [&] { backward(out, d_out.row_range(0, 2), lse, d_qkv); });
  expect_refused(c, "log_sum_exp", [&] { backward(out, d_out, {}, d_qkv); });
  expect_refused(c, "d_qkv", [&] { backward(out, d_out, lse, d_qkv.col_range(0, 128)); });

  const Matrix<const float> k = qkv.col_range(128, 64), v = qkv.col_range(192, 64);
  const auto decode = [&](const float* q, Matrix<const float> keys, Matrix<const float> values, float* o) {
    attention_decode<float>(cpu, c.shape, q, keys, values, o);
  };
  expect_refused(c, "k", [&] { decode(qkv.data, k.row_range(0, 0), v, out.data); });
  expect_refused(c, "k", [&] { decode(qkv.data, k.col_range(0, 32), v, out.data); });
  expect_refused(c, "v", [&] { decode(qkv.data, k, v.row_range(0, 9), out.data); });
  expect_refused(c, "q", [&] { decode(nullptr, k, v, out.data); });
  expect_refused(c, "out", [&] { decode(qkv.data, k, v, nullptr); });
}

}  // namespace
}  // namespace coda::llama
