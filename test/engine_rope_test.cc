// The programs of rotary positions on the CPU engine against the oracle, and the backward one against the derivative of the
// forward.
#include "coda/programs/rope.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

template <class P>
class Rope : public testing::Test {};
using Programs = testing::Types<RmsNormRope<F>, RmsNormRope<B>, RopeBackward<F>, RopeBackward<B>>;
TYPED_TEST_SUITE(Rope, Programs);

TYPED_TEST(Rope, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(Rope, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

TEST(RopeInPlace, OverTheMatrixOfAMap) {
  check_maps<RopeBackward<F>>(3, {.in_place = {{"d_qkv", kMapped}}}, AsTheOracle{}, InPlaceOf<float>{});
  check_maps<RopeBackward<B>>(4, {.in_place = {{"d_qkv", kMapped}}}, AsTheOracle{}, InPlaceOf<bf16>{});
}

/// With the same rows, d_qkv is dL/dacc of the forward program, L = Σ d·qkv.
TEST(RopeBackward_, IsTheDerivativeOfTheForwardProgram) {
  Random random(5);
  constexpr int64_t kRows = 3, kCols = 48;
  Case<RmsNormRope<F>> forward(kRows, kCols, random);
  forward.map<float>();
  Case<RopeBackward<F>> backward(kRows, kCols, random);
  backward.map<float>();
  backward.program().inv_rms = forward.program().inv_rms;
  backward.program().position = forward.program().position;
  backward.program().turns_high = forward.program().turns_high;
  backward.program().turns_low = forward.program().turns_low;
  const auto gradient = backward.expected();
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      double slope = 0;
      for (int64_t c = 0; c < kCols; ++c) slope += backward.acc()(i, c).value * moved["qkv"].value(i, c).slope[0];
      EXPECT_NEAR(gradient["d_qkv"].value(i, j).value, slope, 1e-12) << i << ", " << j;
    }
}

}  // namespace
}  // namespace coda::test
