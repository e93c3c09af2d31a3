// Shapes, strides and sizes that fused kernels elsewhere got wrong, each under the name of its trouble, with the values that showed
// it. Where whole numbers do, results are compared for equality: small integers are exact in float.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "coda/finish.h"
#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "oracle/oracle.h"
#include "program_cases.h"
#include "refused.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

/// A matrix of its own, `shift` elements into memory that is NaN everywhere else.
template <class T>
class Dense {
 public:
  Dense(int64_t rows, int64_t cols, int64_t stride = 0, int64_t shift = 0)
      : memory_(static_cast<size_t>(shift + rows * std::max(stride, cols) + 64)) {
    std::memset(static_cast<void*>(memory_.data()), 0xff, memory_.size() * sizeof(T));
    view_ = {memory_.data() + shift, rows, cols, std::max(stride, cols)};
  }
  Dense(Dense&&) noexcept = default;  // the memory stays where it is

  /// Whole numbers from -3 to 3.
  Dense integers(uint32_t seed) && {
    for (int64_t i = 0; i < view_.rows; ++i)
      for (int64_t j = 0; j < view_.cols; ++j) {
        seed = seed * 1664525U + 1013904223U;
        view_(i, j) = T(static_cast<float>(static_cast<int>((seed >> 16U) % 7) - 3));
      }
    return std::move(*this);
  }
  Dense fill(float value) && {
    for (int64_t i = 0; i < view_.rows; ++i)
      for (int64_t j = 0; j < view_.cols; ++j) view_(i, j) = T(value);
    return std::move(*this);
  }

  Matrix<T> view() const { return view_; }
  Matrix<const T> read() const { return view_; }
  T& operator()(int64_t i, int64_t j) const { return view_(i, j); }

  /// Nothing but these rows and columns has been written.
  void expect_untouched_outside(Matrix<T> written) const {
    for (const T& x : memory_) {
      const int64_t at = &x - written.data;
      const bool inside = at >= 0 && at / written.stride < written.rows && at % written.stride < written.cols;
      ASSERT_TRUE(inside || std::isnan(float(x))) << "element " << &x - memory_.data() << " of the memory";
    }
  }

 private:
  std::vector<T> memory_;
  Matrix<T> view_;
};

/// out is a·bᵀ to the last bit.
template <class T, class A, class C>
void expect_product(Matrix<T> out, const A& a, const C& b) {
  const auto want = oracle::accumulators(oracle::elements(a), oracle::elements(b));
  ASSERT_EQ(out.rows, want.rows);
  ASSERT_EQ(out.cols, want.cols);
  for (int64_t i = 0; i < out.rows; ++i)
    for (int64_t j = 0; j < out.cols; ++j)
      ASSERT_EQ(float(out(i, j)), float(T(static_cast<float>(want(i, j))))) << "row " << i << ", column " << j;
}

// ---- sums

TEST(ASumKeptInBf16StopsGrowing, ButNotHere) {
  // 1024 ones: a sum kept in bf16 would stop at 256.
  const auto ones = Dense<bf16>(1, 1024).fill(1);
  bf16 out(0.F);
  gemm(pool(1), ones.read(), ones.read(), Store<B>{.out = {&out, 1, 1}});
  EXPECT_EQ(float(out), 1024);
  float total = 0;
  for (int i = 0; i < 1024; ++i)
    gemm(pool(1), ones.read().col_range(0, 1), ones.read().col_range(0, 1), AccumulateInto<B>{.out = {&total, 1, 1}});
  EXPECT_EQ(total, 1024);
}

/// Five logits of −20 in lanes of eight or sixteen: lanes past the vocabulary are no logits of 0.
template <class E, class Keep>
void expect_loss_of_five_equal_logits() {
  constexpr int64_t kV = 5;
  const auto logits = Dense<float>(1, kV).fill(-20);
  float one = 1, lse = NAN, maximum = NAN, label_logit = NAN;
  int32_t label = 0;
  MaxSum slot{NAN, NAN};
  const Dense<E> relative(1, kV);
  CrossEntropy<Tensors<E>, Keep> forward{
      .inv_rms = {&one, 1}, .label = {&label, 1}, .log_sum_exp = {&slot, 1, 1}, .label_logit = {&label_logit, 1, 1}};
  if constexpr (Keep::value) {
    forward.maxima = {&maximum, 1, 1};
    forward.relative_logits = relative.view();
  }
  map(pool(1), logits.read(), forward);
  log_sum_exp(pool(1), Matrix<const MaxSum>(&slot, 1, 1), {&lse, 1});
  EXPECT_NEAR(lse - label_logit, 1.60944, 4e-6);  // ln 5, of terms of 20; with three lanes of 0 it would be 21.0986

  float dot = NAN;
  const float minus_one = -1;
  const Dense<E> d_logits(1, kV);
  CrossEntropyBackward<Tensors<E>, Keep> backward{.inv_rms = {&one, 1},
                                                  .label = {&label, 1},
                                                  .log_sum_exp = {&lse, 1},
                                                  .d_log_sum_exp = {&one, 1},
                                                  .d_label_logit = {&minus_one, 1},
                                                  .d_logits = d_logits.view(),
                                                  .dot = {&dot, 1, 1}};
  if constexpr (Keep::value) {
    backward.maxima = {&maximum, 1, 1};
    map(pool(1), relative.read(), backward);
  } else {
    map(pool(1), logits.read(), backward);
  }
  for (int64_t j = 0; j < kV; ++j) EXPECT_NEAR(float(d_logits(0, j)), j == 0 ? -0.8 : 0.2, 2e-3) << j;
  d_logits.expect_untouched_outside(d_logits.view());
}
TEST(ColumnsPastTheVocabulary, AreNoLogits) {
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    SCOPED_TRACE(verify::engine_name(isa));
    expect_loss_of_five_equal_logits<float, KeepLogits>();
    expect_loss_of_five_equal_logits<bf16, KeepLogits>();
    expect_loss_of_five_equal_logits<float, RecomputeLogits>();
    expect_loss_of_five_equal_logits<bf16, RecomputeLogits>();
  }
}

// ---- offsets past 32 bits

TEST(Large, TheLastOfAMillionRows) {
  constexpr int64_t kRows = (int64_t{1} << 20) + 3, kN = 16, kK = 64, kLast = 200;
  const auto a = Dense<bf16>(kRows, kK).integers(1), weight = Dense<bf16>(kN, kK).integers(2);
  const Dense<bf16> all(kRows, kN), last(kLast, kN);
  gemm(pool(2), a.read(), weight.read(), Store<B>{.out = all.view()});
  gemm(pool(2), a.read().row_range(kRows - kLast, kLast), weight.read(), Store<B>{.out = last.view()});
  EXPECT_EQ(std::memcmp(&last(0, 0), &all(kRows - kLast, 0), kLast * kN * sizeof(bf16)), 0);
  expect_product(last.view(), a.read().row_range(kRows - kLast, kLast), weight.read());
}

/// Memory that is zero until touched.
struct Pages {
  size_t bytes;
  void* data;
  explicit Pages(size_t n)
      : bytes(n), data(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Pages() {
    if (data != MAP_FAILED) munmap(data, bytes);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
};

/// Logits of a vocabulary of 128256: the last token's begin past 2^31 elements. Only the last columns are touched.
TEST(Large, LogitsPastTwoToThe31) {
  constexpr int64_t kVocabulary = 128256, kRows = 16745, kN = 16, kK = 8;
  static_assert((kRows - 1) * kVocabulary > int64_t{1} << 31);
  const Pages pages(kRows * kVocabulary * sizeof(bf16));
  if (pages.data == MAP_FAILED) GTEST_SKIP() << "no address space for 4.3 GB";
  const Matrix<bf16> logits(static_cast<bf16*>(pages.data), kRows, kVocabulary);
  const Matrix<bf16> out = logits.col_range(kVocabulary - kN, kN);
  const auto a = Dense<bf16>(kRows, kK).integers(3), weight = Dense<bf16>(kN, kK).integers(4);
  gemm(pool(2), a.read(), weight.read(), Store<B>{.out = out});
  expect_product(out, a.read(), weight.read());
}

/// Rows so far apart that offsets do not fit into 32 bits: little memory is touched, though much is spanned.
TEST(Large, StridesPastTwoToThe31) {
  constexpr int64_t kRows = 5, kN = 48, kK = 40, kStride = (int64_t{1} << 29) + 7;  // row 4 begins past 2^31 elements
  const auto span = [](int64_t cols) { return static_cast<size_t>((kRows - 1) * kStride + cols) * sizeof(bf16); };
  Pages a_pages(span(kK)), h_pages(span(kN)), out_pages(span(kN));
  if (a_pages.data == MAP_FAILED || h_pages.data == MAP_FAILED || out_pages.data == MAP_FAILED)
    GTEST_SKIP() << "no address space for 3 x 4 GB";
  Random random(6);
  const Matrix<bf16> a(static_cast<bf16*>(a_pages.data), kRows, kK, kStride);
  const Matrix<bf16> residual(static_cast<bf16*>(h_pages.data), kRows, kN, kStride);
  const Matrix<bf16> h(static_cast<bf16*>(out_pages.data), kRows, kN, kStride);
  std::vector<bf16> b(kN * kK), packed_a(kRows * kK), packed_residual(kRows * kN), packed_h(kRows * kN);
  for (bf16& x : b) x = bf16(static_cast<float>(normal(random)));
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t k = 0; k < kK; ++k) packed_a[i * kK + k] = a(i, k) = bf16(static_cast<float>(normal(random)));
    for (int64_t j = 0; j < kN; ++j)
      packed_residual[i * kN + j] = residual(i, j) = bf16(static_cast<float>(normal(random)));
  }
  const Matrix<const bf16> weight(b.data(), kN, kK);
  std::vector<float> sums(kRows), packed_sums(kRows);
  const Residual<B> packed{.residual = {packed_residual.data(), kRows, kN},
                           .h = {packed_h.data(), kRows, kN},
                           .sum_sq = {packed_sums.data(), 1, kRows}};
  gemm(pool(1), Matrix<const bf16>(packed_a.data(), kRows, kK), weight, packed);
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    gemm(pool(1), Matrix<const bf16>(packed_a.data(), kRows, kK), weight, packed);
    gemm(pool(2), Matrix<const bf16>(a), weight,
         Residual<B>{.residual = residual, .h = h, .sum_sq = {sums.data(), 1, kRows}});
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(h(i, j).bits, packed.h(i, j).bits) << i << ", " << j;
    EXPECT_EQ(sums, packed_sums);
    // The same rows as the depth of a product, both factors transposed: offsets of whole rows along the depth.
    std::vector<float> wide(kK * kN), packed_wide(kK * kN);
    gemm(pool(2), transpose(Matrix<const bf16>(a)), transpose(Matrix<const bf16>(residual)),
         Store<B, float>{.out = {wide.data(), kK, kN}});
    gemm(pool(2), transpose(Matrix<const bf16>(packed_a.data(), kRows, kK)),
         transpose(Matrix<const bf16>(packed_residual.data(), kRows, kN)),
         Store<B, float>{.out = {packed_wide.data(), kK, kN}});
    EXPECT_EQ(wide, packed_wide);
  }
}

// ---- strides

/// The gradient of sum() is one 1 for everybody: stride 0 between rows, in other libraries. A view's rows must not share memory here,
/// so it is refused by name, before anything is written, in every place where a matrix can stand; written out it gives the gradient.
TEST(ExpandedUpstreamGradient, IsRefusedByName) {
  constexpr int64_t kM = 2 * 1024, kN = 256;
  const auto ones = Dense<bf16>(1, kN).fill(1), h = Dense<bf16>(kM, kN).integers(5),
             weight = Dense<bf16>(kN, kN).integers(6);
  const Matrix<const bf16> expanded(&ones(0, 0), kM, kN, 0);
  const auto r = Dense<float>(1, kM).fill(0.5), s = Dense<float>(1, kM).fill(2);
  const Dense<bf16> d_h(kM, kN), d_w(kN, kN);
  RmsNormBackward<B> program{
      .inv_rms = {&r(0, 0), kM}, .mean_dot = {&s(0, 0), kM}, .h = h.view(), .d_residual = expanded, .d_h = d_h.view()};
  const std::string got = "of stride 0", needs = "at least its 256 columns";
  expect_refused<OperandError>([&] { gemm(pool(1), h.read(), transpose(weight.read()), program); }, "d_residual", got,
                               needs);
  program.d_residual = h.view();
  expect_refused<OperandError>([&] { gemm(pool(1), expanded, transpose(weight.read()), program); }, "a", got, needs);
  expect_refused<OperandError>([&] { map(pool(1), expanded, program); }, "x", got, needs);
  expect_refused<OperandError>(
      [&] { gemm(pool(1), transpose(expanded), transpose(h.read()), Store<B>{.out = d_w.view()}); }, "a", got, needs);
  d_h.expect_untouched_outside({&d_h(0, 0), 0, 0, 1});
  d_w.expect_untouched_outside({&d_w(0, 0), 0, 0, 1});

  const auto written_out = Dense<bf16>(kM, kN).fill(1);
  program.d_residual = written_out.view();
  gemm(pool(2), written_out.read(), transpose(weight.read()), program);
  for (int64_t i = 0; i < kM; i += 97)
    for (int64_t j = 0; j < kN; ++j) {
      float column = 0;
      for (int64_t o = 0; o < kN; ++o) column += float(weight(o, j));
      ASSERT_EQ(float(d_h(i, j)), float(bf16(column - 0.25F * 2 * float(h(i, j)) + 1))) << i << ", " << j;
    }
}

/// Two gradients meet in front of a norm: the stream's is added behind the norm's Jacobian, not sent through it.
template <class E>
void expect_stream_gradient_is_added_last() {
  constexpr int64_t kM = 5, kN = 40;
  const auto h = Dense<E>(kM, kN).integers(7), g1 = Dense<E>(kM, kN).integers(8), acc = Dense<E>(kM, kN).integers(9);
  const auto r = Dense<float>(1, kM).fill(0.5), s = Dense<float>(1, kM).fill(4), zeros = Dense<float>(1, kM).fill(0);
  const Dense<E> d_h(kM, kN);
  RmsNormBackward<Tensors<E>> program{
      .inv_rms = {&r(0, 0), kM}, .mean_dot = {&s(0, 0), kM}, .h = h.view(), .d_residual = g1.view(), .d_h = d_h.view()};
  map(pool(1), acc.read(), program);
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t j = 0; j < kN; ++j)
      ASSERT_EQ(float(d_h(i, j)), float(acc(i, j)) - 0.25F * 4 * float(h(i, j)) + float(g1(i, j))) << i << ", " << j;
  // No gradient through the norm: the stream's own, to the last bit.
  program.mean_dot = {&zeros(0, 0), kM};
  map(pool(1), Dense<E>(kM, kN).fill(0).read(), program);
  for (int64_t i = 0; i < kM; ++i) ASSERT_EQ(std::memcmp(&d_h(i, 0), &g1(i, 0), kN * sizeof(E)), 0) << "row " << i;
}
TEST(PreNormBackward, TheStreamsGradientIsAddedAfterTheJacobian) {
  expect_stream_gradient_is_added_last<float>();
  expect_stream_gradient_is_added_last<bf16>();
}

/// Gate and up as two halves of a row: the second half of a bf16 row of F = 3420, 1234 or 12 begins at any even address.
TEST(HalfRowAlignment, TheSecondHalfIsReadAndWrittenAsItLies) {
  for (int64_t f : {3420, 1234, 12}) {
    constexpr int64_t kM = 5, kN = 24;
    SCOPED_TRACE(f);
    const auto halves = Dense<bf16>(kM, 2 * f).integers(10), weight = Dense<bf16>(kN, f).integers(11),
               x = Dense<bf16>(kM, kN).integers(12), up = Dense<bf16>(f, kN).integers(13);
    const Dense<float> down(kM, kN);
    gemm(pool(2), halves.read().col_range(f, f), weight.read(), Store<F>{.out = down.view()});
    expect_product(down.view(), halves.read().col_range(f, f), weight.read());
    const Dense<bf16> z(kM, 2 * f);
    gemm(pool(2), x.read(), up.read(), Store<B>{.out = z.view().col_range(f, f)});
    expect_product(z.view().col_range(f, f), x.read(), up.read());
    z.expect_untouched_outside(z.view().col_range(f, f));
  }
}
/// Packed pairs stand in blocks of 8, which these widths do not fill: an error that says how wide, and nothing written.
TEST(HalfRowAlignment, PairsNameTheWidthThatTheyCannotHave) {
  for (int64_t f : {3420, 1234, 12}) {
    constexpr int64_t kM = 3, kK = 8;
    const auto x = Dense<bf16>(kM, kK).integers(14), weight = Dense<bf16>(2 * f, kK).integers(15);
    const auto r = Dense<float>(1, kM).fill(1);
    const Dense<bf16> gate_up(kM, 2 * f), y(kM, f), d(kM, 2 * f);
    const Dense<float> dot((f + 127) / 128, kM);
    const RmsNormSwiGlu<B> forward{.inv_rms = {&r(0, 0), kM}, .gate_up = gate_up.view(), .y = y.view()};
    expect_refused<OperandError>([&] { gemm(pool(1), x.read(), weight.read(), forward); }, "b",
                                 std::to_string(2 * f) + " wide",
                                 "a multiple of 16, since the program takes pairs in blocks of 8 and 8 columns");
    const SwiGluBackward<B> backward{.inv_rms = {&r(0, 0), kM},
                                     .gate_up = d.view(),
                                     .d_gate_up = gate_up.view(),
                                     .y = y.view(),
                                     .dot_z = dot.view()};
    expect_refused<OperandError>([&] { gemm(pool(1), x.read(), weight.read().row_range(0, f), backward); }, "b",
                                 std::to_string(f) + " wide",
                                 "a multiple of 8, since gate_up holds pairs in blocks of 8 and 8 columns");
    gate_up.expect_untouched_outside({&gate_up(0, 0), 0, 0, 1});
    y.expect_untouched_outside({&y(0, 0), 0, 0, 1});
  }
}

/// Rows that do not begin on multiples of 16 bytes: bf16 with stride 65, from one element past an aligned address, 12 columns wide.
TEST(RowsOffSixteenBytes, GiveTheSameNumbers) {
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    SCOPED_TRACE(verify::engine_name(isa));
    for (int64_t n : {64, 12})
      for (int64_t shift : {0, 1}) {
        const auto a = Dense<bf16>(64, 64, 65, shift).integers(16), b = Dense<bf16>(n, 64, 65, shift).integers(17),
                   turned = Dense<bf16>(64, n, n + 1, shift).integers(18),
                   h = Dense<bf16>(64, n, 65, shift).integers(19);
        const Dense<bf16> out(64, n, 65, shift);
        gemm(pool(2), a.read(), b.read(), Store<B>{.out = out.view()});
        expect_product(out.view(), a.read(), b.read());
        out.expect_untouched_outside(out.view());
        gemm(pool(2), transpose(a.read()), transpose(turned.read()), Store<B>{.out = out.view()});
        expect_product(out.view(), transpose(a.read()), transpose(turned.read()));
        const Dense<float> sums(1, 64);
        gemm(pool(2), a.read(), b.read(), Residual<B>{.residual = h.view(), .h = out.view(), .sum_sq = sums.view()});
        const auto acc = oracle::accumulators(oracle::elements(a.read()), oracle::elements(b.read()));
        for (int64_t i = 0; i < 64; ++i)
          for (int64_t j = 0; j < n; ++j)
            ASSERT_EQ(float(out(i, j)), float(bf16(static_cast<float>(acc(i, j)) + float(h(i, j))))) << i << ", " << j;
        out.expect_untouched_outside(out.view());
      }
  }
}

TEST(EmptyProblems, GiveWhatIsLeft) {
  constexpr int64_t kM = 6, kN = 20;
  const auto a = Dense<float>(kM, 8).integers(20), b = Dense<float>(kN, 8).integers(21),
             h = Dense<float>(kM, kN).integers(22);
  // No tokens: nothing to write, and no fault. No outputs: the same.
  const Dense<float> none(0, kN), out(kM, kN);
  gemm(pool(2), a.read().row_range(0, 0), b.read(), Store<F>{.out = none.view()});
  gemm(pool(2), a.read(), b.read().row_range(0, 0), Store<F>{.out = Dense<float>(kM, 0).view()});
  none.expect_untouched_outside({&none(0, 0), 0, 0, 1});
  // The weight gradient of no tokens: zeros, written.
  const Dense<float> d_w(kN, 8);
  gemm(pool(2), transpose(h.read().row_range(0, 0)), transpose(a.read().row_range(0, 0)), Store<F>{.out = d_w.view()});
  for (int64_t i = 0; i < kN; ++i)
    for (int64_t j = 0; j < 8; ++j) ASSERT_EQ(d_w(i, j), 0) << i << ", " << j;
  // Nothing to sum over: the residual, what was there, or zero, exactly.
  const Matrix<const float> no_depth_a(nullptr, kM, 0), no_depth_b(nullptr, kN, 0);
  const Dense<float> sums(1, kM);
  gemm(pool(2), no_depth_a, no_depth_b, Residual<F>{.residual = h.view(), .h = out.view(), .sum_sq = sums.view()});
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(out(i, j), h(i, j)) << i << ", " << j;
  gemm(pool(2), no_depth_a, no_depth_b, AccumulateInto<F>{.out = out.view()});
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(out(i, j), h(i, j)) << i << ", " << j;
  gemm(pool(2), no_depth_a, no_depth_b, Store<F>{.out = out.view()});
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(out(i, j), 0) << i << ", " << j;
}

/// x = base[:, :K] of [M, 2K], the output columns of a wider buffer. A step between columns other than 1 cannot be said: a Matrix has
/// a row stride only, and the transposed form is transpose(matrix), for factors.
TEST(Views, AreReadAndWrittenInPlace) {
  constexpr int64_t kM = 37, kN = 24, kK = 50;
  const auto base = Dense<bf16>(kM, 2 * kK).integers(23), weight = Dense<bf16>(kN, 2 * kK).integers(24),
             turned = Dense<bf16>(2 * kK, 3 * kN).integers(25);
  const Dense<float> buffer(kM, 3 * kN), packed(kM, kN);
  const auto x = base.read().col_range(0, kK);
  const Matrix<float> out = buffer.view().col_range(kN, kN);
  Dense<bf16> packed_x(kM, kK);
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t k = 0; k < kK; ++k) packed_x(i, k) = base(i, k);

  gemm(pool(2), x, weight.read().col_range(kK, kK), Store<F>{.out = out});
  expect_product(out, x, weight.read().col_range(kK, kK));
  buffer.expect_untouched_outside(out);
  gemm(pool(2), packed_x.read(), weight.read().col_range(kK, kK), Store<F>{.out = packed.view()});
  for (int64_t i = 0; i < kM; ++i)
    ASSERT_EQ(std::memcmp(&out(i, 0), &packed(i, 0), kN * sizeof(float)), 0) << "row " << i;
  // The transposed form, of rows and columns in the middle.
  const auto block = turned.read().row_range(kK / 2, kK).col_range(kN, kN);
  gemm(pool(2), x, transpose(block), Store<F>{.out = out});
  expect_product(out, x, transpose(block));
  buffer.expect_untouched_outside(out);
}

/// Twenty times the same call, 4096 rows: no sum may depend on which thread came first.
template <class P>
void expect_the_same_bits_every_time() {
  Random random(26);
  Case<P> c(4096, 48, random);
  c.template product<bf16, bf16>(40, Order::plain, Order::transposed);
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    SCOPED_TRACE(verify::name_of_program<P>() + " on " + verify::engine_name(isa));
    c.run(pool(1));
    const auto first = c.memory();
    for (int i = 0; i < 20; ++i) {
      c.run(pool(2 + i % 3));
      ASSERT_EQ(c.memory() == first, true) << "call " << i;
    }
  }
}
TEST(TheSameCallTwentyTimes, GivesTheSameBits) {
  expect_the_same_bits_every_time<RmsNormBackward<B, StreamJoins, GammaInEpilogue>>();
  expect_the_same_bits_every_time<AccumulateInto<B>>();
  expect_the_same_bits_every_time<CrossEntropy<B>>();
  // A weight gradient: the tokens are what is summed over.
  const auto d_y = Dense<bf16>(4096, 40).integers(27), x = Dense<bf16>(4096, 24).integers(28);
  const Dense<float> first(40, 24), again(40, 24);
  gemm(pool(1), transpose(d_y.read()), transpose(x.read()), Store<F>{.out = first.view()});
  for (int i = 0; i < 20; ++i) {
    gemm(pool(2 + i % 3), transpose(d_y.read()), transpose(x.read()), Store<F>{.out = again.view()});
    ASSERT_EQ(std::memcmp(&first(0, 0), &again(0, 0), 40 * 24 * sizeof(float)), 0) << "call " << i;
  }
}

}  // namespace
}  // namespace coda::test
