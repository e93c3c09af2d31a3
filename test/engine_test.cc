// The public templates, which the cases of programs go around.
#include "coda/programs/store.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

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

/// A matrix of whole numbers from -8 to 8 in rows three values further apart than they need be, NaN between them.
struct WholeNumbers {
  WholeNumbers(int64_t rows, int64_t cols, Random& random)
      : values(static_cast<size_t>(rows * (cols + 3)), bf16(NAN)), matrix(values.data(), rows, cols, cols + 3) {
    std::uniform_int_distribution<int> whole(-8, 8);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) matrix(i, j) = bf16(static_cast<float>(whole(random)));
  }
  Matrix<const bf16> view() const { return {matrix.data, matrix.rows, matrix.cols, matrix.stride}; }
  float operator()(int64_t i, int64_t j) const { return matrix(i, j); }

  std::vector<bf16> values;
  Matrix<bf16> matrix;
};

// Whatever the order of the sum, it is exact: a term that is left out or taken twice, or a value from beyond an end, shows.
TEST(Gemm, Bf16FactorsOfAnyDepthAreSummedExactly) {
  Random random(6);
  for (const int64_t k : {0, 1, 2, 3, 15, 16, 17, 31, 255, 256, 257, 511, 513})
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>{1, 1}, {13, 31}, {29, 33}, {14, 160}}) {
      const WholeNumbers a(m, k, random), b(n, k, random), turned_a(k, m, random), turned_b(k, n, random);
      for (const cpu::Isa isa : instruction_sets()) {
        const Chosen chosen(isa);
        const auto check = [&](const char* form, const auto& left, const auto& right, const auto& a_of,
                               const auto& b_of) {
          std::vector<float> out(static_cast<size_t>(m * n), NAN);
          gemm(pool(2), left, right, Store<F>{.out = {out.data(), m, n}});
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j) {
              float sum = 0;
              for (int64_t d = 0; d < k; ++d) sum += a_of(i, d) * b_of(j, d);
              ASSERT_EQ(out[static_cast<size_t>(i * n + j)], sum)
                  << form << " on " << cpu::name(isa) << ", depth " << k << ", row " << i << ", column " << j;
            }
        };
        const auto turned = [](const WholeNumbers& x) { return [&x](int64_t i, int64_t d) { return x(d, i); }; };
        check("TN", a.view(), b.view(), a, b);
        check("NN", a.view(), transpose(turned_b.view()), a, turned(turned_b));
        check("NT", transpose(turned_a.view()), transpose(turned_b.view()), turned(turned_a), turned(turned_b));
      }
    }
}

}  // namespace
}  // namespace coda::test
