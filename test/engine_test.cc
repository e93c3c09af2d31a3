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

}  // namespace
}  // namespace coda::test
