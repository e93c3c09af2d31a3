// The programs of SwiGLU on the CPU engine against the oracle, and the backward one against the derivative of the forward.
#include "coda/programs/swiglu.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

template <class P>
class SwiGlu : public testing::Test {};
using Programs = testing::Types<RmsNormSwiGlu<F>, RmsNormSwiGlu<B>, RmsNormSwiGlu<F, DropGateUp>,
                                RmsNormSwiGlu<B, DropGateUp>, SwiGluBackward<F>, SwiGluBackward<B>>;
TYPED_TEST_SUITE(SwiGlu, Programs);

TYPED_TEST(SwiGlu, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(SwiGlu, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

TEST(SwiGluInPlace, TheGradientOverwritesGateAndUp) {
  check_products<SwiGluBackward<F>>(3, {.in_place = {{"d_gate_up", "gate_up"}}});
  check_products<SwiGluBackward<B>>(4, {.in_place = {{"d_gate_up", "gate_up"}}});
}

/// d_gate_up is dL/dacc of the forward program, L = Σ d_y·y: move the accumulators a little and see.
TEST(SwiGluBackward_, IsTheDerivativeOfTheForwardProgram) {
  Random random(5);
  constexpr int64_t kRows = 3, kHidden = 24;
  Case<RmsNormSwiGlu<F>> forward(kRows, 2 * kHidden, random);
  forward.map<float>();
  Case<SwiGluBackward<F>> backward(kRows, kHidden, random);
  backward.map<float>();
  const auto value = forward.expected()["gate_up"].value;
  for (int64_t i = 0; i < kRows; ++i) {
    const_cast<float&>(backward.program().inv_rms[i]) = forward.program().inv_rms[i];
    for (int64_t j = 0; j < 2 * kHidden; ++j)
      const_cast<float&>(backward.program().gate_up(i, j)) = static_cast<float>(value(i, j).value);
  }
  backward.remember();
  const auto gradient = backward.expected();
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < 2 * kHidden; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      double slope = 0;
      for (int64_t f = 0; f < kHidden; ++f) slope += backward.acc()(i, f).value * moved["y"].value(i, f).slope[0];
      // gate_up is stored in float.
      EXPECT_NEAR(gradient["d_gate_up"].value(i, j).value, slope, 1e-6) << i << ", " << j;
    }
}

}  // namespace
}  // namespace coda::test
