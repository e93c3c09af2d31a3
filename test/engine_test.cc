// What the tests of programs rest on: that a wrong element is found, and the forms and sizes that no single program needs.
#include <gtest/gtest-spi.h>
#include <sys/mman.h>

#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

// ---- the tests can fail

/// Runs c, spoils what it stored, and expects that the comparison notices.
template <class P, class Spoil>
void expect_noticed(Case<P>& c, const std::string& what, const Spoil& spoil) {
  const auto expected = c.expected();
  c.run(pool(1));
  const Worst before = c.compare(expected);
  EXPECT_LE(before.score, 1) << before;
  spoil(c, expected);
  EXPECT_GT(c.compare(expected).score, 1) << what << " goes unnoticed";
}

/// Where output is largest.
std::pair<int64_t, int64_t> largest(const oracle::Output<Bounded>& output) {
  std::pair<int64_t, int64_t> at{0, 0};
  for (int64_t i = 0; i < output.value.rows; ++i)
    for (int64_t j = 0; j < output.value.cols; ++j)
      if (std::fabs(output.value(i, j).value) > std::fabs(output.value(at.first, at.second).value)) at = {i, j};
  return at;
}

/// Every output of P, its largest element and the median one 1 % too large.
template <class P>
void scaled_elements_are_noticed() {
  Random random(1);
  for (const Field& field : describe<P>()) {
    if (field.direction != Direction::out || field.kind == Kind::off) continue;
    Case<P> c(37, 48, random);
    c.template product<bf16, bf16>(200, Order::plain, Order::plain);
    expect_noticed(c, std::string(field.name) + " x 1.01", [&](Case<P>& spoilt, const auto& expected) {
      const auto [i, j] = largest(expected[field.name]);
      Storage& memory = spoilt.storage_of(std::string(field.name));
      const double right = Case<P>::stored(memory, field.element, i, j);
      Case<P>::store(memory, field.element, i, j, 1.01 * right);
    });
    expect_noticed(c, std::string(field.name) + " unwritten at its end", [&](Case<P>& spoilt, const auto& expected) {
      const auto& value = expected[field.name].value;
      Case<P>::store(spoilt.storage_of(std::string(field.name)), field.element, value.rows - 1, value.cols - 1, NAN);
    });
    expect_noticed(c, std::string(field.name) + " one column off", [&](Case<P>& spoilt, const auto& expected) {
      const auto& value = expected[field.name].value;
      Storage& memory = spoilt.storage_of(std::string(field.name));
      for (int64_t i = 0; i < value.rows; ++i)
        for (int64_t j = value.cols - 1; j > 0; --j)
          Case<P>::store(memory, field.element, i, j, Case<P>::stored(memory, field.element, i, j - 1));
    });
  }
}
TEST(TheTests, NoticeWrongElements) {
  scaled_elements_are_noticed<Store<F>>();
  scaled_elements_are_noticed<Store<B>>();
  scaled_elements_are_noticed<AccumulateInto<B>>();
  scaled_elements_are_noticed<Residual<B, GammaInEpilogue>>();
  scaled_elements_are_noticed<RmsNormBackward<F, StreamJoins, GammaInEpilogue>>();
  scaled_elements_are_noticed<RmsNormSwiGlu<B>>();
  scaled_elements_are_noticed<SwiGluBackward<B>>();
}

TEST(TheTests, NoticePartnersSwapped) {
  Random random(2);
  Case<RmsNormSwiGlu<B>> c(5, 48, random);
  c.product<float, float>(64, Order::plain, Order::plain);
  expect_noticed(c, "gate and up swapped in one pair", [](auto& spoilt, const auto&) {
    Matrix<bf16> z = spoilt.program().gate_up;
    std::swap(z(3, 17), z(3, 25));
  });
}

/// The oracle of a product that lacks one of its terms, against the engine's whole one.
template <class P>
void a_missing_term_is_noticed(int64_t k) {
  Random random(3);
  Case<P> c(20, 32, random);
  c.template product<float, float>(k, Order::plain, Order::plain);
  c.run(pool(1));
  oracle::Grid<Bounded> acc = c.acc();
  const float* a = c.storage_of("a").template data<float>();
  const float* b = c.storage_of("b").template data<float>();
  const int64_t a_stride = c.storage_of("a").stride(), b_stride = c.storage_of("b").stride();
  int64_t noticed = 0;
  const auto whole = oracle::apply<Bounded>(acc, c.program());
  for (int64_t i = 0; i < c.m(); ++i)
    for (int64_t j = 0; j < c.n(); ++j) acc(i, j).value -= double(a[i * a_stride + k - 1]) * b[j * b_stride + k - 1];
  const auto expected = oracle::apply<Bounded>(acc, c.program())["out"];
  for (int64_t i = 0; i < c.m(); ++i)
    for (int64_t j = 0; j < c.n(); ++j)
      noticed += score(Case<P>::stored(c.storage_of("out"), expected.field.element, i, j), expected.value(i, j),
                       expected.field.element) > 1;
  EXPECT_LE(c.compare(whole).score, 1);
  // A term can be next to nothing, or less than a bf16 can tell; most are not.
  EXPECT_GE(noticed, c.m() * c.n() * 8 / 10) << "of " << c.m() * c.n();
}
TEST(TheTests, NoticeAMissingTerm) {
  a_missing_term_is_noticed<Store<F>>(513);
  a_missing_term_is_noticed<Store<B>>(16);
}

TEST(TheTests, NoticeWritesOutsideAnOutput) {
  Random random(4);
  Case<Store<F>> c(5, 7, random);
  c.product<float, float>(3, Order::plain, Order::plain);
  c.run(pool(1));
  c.program().out.data[7] = 0;  // between two rows
  EXPECT_NONFATAL_FAILURE(c.expect_untouched(), "memory outside the output was written, at row 0, column 7");
  c.run(pool(1));
  c.storage_of("a").data<float>()[0] += 1;
  EXPECT_NONFATAL_FAILURE(c.expect_untouched(), "an input was written");
}

// ---- the public templates, which the cases go around

template <class A, class B>
void every_form(const char* types) {
  SCOPED_TRACE(types);
  constexpr int64_t kM = 5, kN = 9, kK = 7;
  Random random(5);
  const auto filled = [&](auto& memory) {
    for (auto& x : memory) x = std::remove_reference_t<decltype(x)>(static_cast<float>(normal(random)));
  };
  std::vector<A> a(kM * kK);
  std::vector<B> b(kN * kK);
  filled(a);
  filled(b);
  const auto check = [&](const auto& left, const auto& right) {
    std::vector<float> out(kM * kN, NAN);
    const Store<F> program{.out = {out.data(), kM, kN}};
    const auto want = oracle::gemm(left, right, program)["out"].value;
    gemm(pool(2), left, right, program);
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t j = 0; j < kN; ++j) EXPECT_NEAR(program.out(i, j), want(i, j), 1e-6 * kK) << i << ", " << j;
  };
  const Matrix<const A> plain_a(a.data(), kM, kK), turned_a(a.data(), kK, kM);
  const Matrix<const B> plain_b(b.data(), kN, kK), turned_b(b.data(), kK, kN);
  check(plain_a, plain_b);
  check(plain_a, transpose(turned_b));
  check(transpose(turned_a), plain_b);
  check(transpose(turned_a), transpose(turned_b));
}
TEST(Gemm, EveryFormOfFloatAndBf16) {
  every_form<float, float>("float, float");
  every_form<float, bf16>("float, bf16");
  every_form<bf16, float>("bf16, float");
  every_form<bf16, bf16>("bf16, bf16");
}

TEST(Gemm, SumsInFloat) {
  // 1024 ones: a sum kept in bf16 would stop at 256.
  std::vector<bf16> ones(1024, bf16(1.f));
  bf16 out(0.f);
  gemm(pool(1), Matrix<const bf16>(ones.data(), 1, 1024), Matrix<const bf16>(ones.data(), 1, 1024),
       Store<B>{.out = {&out, 1, 1}});
  EXPECT_EQ(float(out), 1024);
  float total = 0;
  for (int i = 0; i < 1024; ++i)
    gemm(pool(1), Matrix<const bf16>(ones.data(), 1, 1), Matrix<const bf16>(ones.data(), 1, 1),
         AccumulateInto<B>{.out = {&total, 1, 1}});
  EXPECT_EQ(total, 1024);
}

// ---- sizes

TEST(Large, TheLastOfAMillionRows) {
  constexpr int64_t kRows = (int64_t{1} << 20) + 3, kN = 16, kK = 64, kLast = 200;
  std::vector<bf16> a(kRows * kK), b(kN * kK);
  uint32_t state = 1;
  for (bf16& x : a) {
    state = state * 1664525U + 1013904223U;
    x = bf16(static_cast<float>(state >> 16) * 0x1p-15f - 1.f);
  }
  for (size_t i = 0; i < b.size(); ++i) b[i] = bf16(static_cast<float>(i % 13) - 6.f);
  std::vector<bf16> all(kRows * kN), last(kLast * kN);
  const Matrix<const bf16> rows(a.data(), kRows, kK), weight(b.data(), kN, kK);
  gemm(pool(2), rows, weight, Store<B>{.out = {all.data(), kRows, kN}});
  gemm(pool(2), rows.row_range(kRows - kLast, kLast), weight, Store<B>{.out = {last.data(), kLast, kN}});
  EXPECT_EQ(std::memcmp(last.data(), all.data() + (kRows - kLast) * kN, last.size() * sizeof(bf16)), 0);
}

/// Rows so far apart that offsets do not fit into 32 bits: little memory is touched, though much is spanned.
TEST(Large, OffsetsPastTwoToThe31) {
  constexpr int64_t kRows = 5, kN = 48, kK = 40, kStride = (int64_t{1} << 29) + 7;  // row 4 begins past 2^31 elements
  const auto span = [](int64_t cols) { return static_cast<size_t>((kRows - 1) * kStride + cols) * sizeof(bf16); };
  struct Pages {  // zero until touched
    size_t bytes;
    void* data;
    explicit Pages(size_t n)
        : bytes(n),
          data(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
    ~Pages() {
      if (data != MAP_FAILED) munmap(data, bytes);
    }
  };
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

}  // namespace
}  // namespace coda::test
