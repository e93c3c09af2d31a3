// The programs of gated linear units on the CPU engine against the oracle, and the backward one against the derivative of the
// forward.
#include "coda/programs/swiglu.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

/// d_gate_up is dL/dacc of the forward program, L = Σ d_y·y: move the accumulators a little and see. dot_z is their product
/// with gate_up, before inv_rms.
template <class Function>
class GluBackward_ : public testing::Test {};
using Functions = testing::Types<Swiglu, GegluErf, GegluTanh, SwigluClamped>;
TYPED_TEST_SUITE(GluBackward_, Functions);

TYPED_TEST(GluBackward_, IsTheDerivativeOfTheForwardProgram) {
  Random random(5);
  constexpr int64_t kRows = 3, kHidden = 24;
  Case<RmsNormGlu<F, TypeParam>> forward(kRows, 2 * kHidden, random);
  forward.template map<float>();
  Case<GluBackward<F, TypeParam>> backward(kRows, kHidden, random);
  backward.template map<float>();
  backward.program().f = forward.program().f;
  const auto outputs = forward.expected();
  const auto& value = outputs["gate_up"].value;
  for (int64_t i = 0; i < kRows; ++i) {
    const_cast<float&>(backward.program().inv_rms[i]) = forward.program().inv_rms[i];
    for (int64_t j = 0; j < 2 * kHidden; ++j)
      const_cast<float&>(backward.program().gate_up(i, j)) = static_cast<float>(value(i, j).value);
  }
  backward.remember();
  const auto gradient = backward.expected();
  for (int64_t i = 0; i < kRows; ++i) {
    double dot = 0;
    for (int64_t j = 0; j < 2 * kHidden; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      double slope = 0;
      for (int64_t f = 0; f < kHidden; ++f) slope += backward.acc()(i, f).value * moved["y"].value(i, f).slope[0];
      // gate_up is stored in float.
      EXPECT_NEAR(gradient["d_gate_up"].value(i, j).value, slope, 1e-6) << i << ", " << j;
      dot += slope * forward.acc()(i, j).value;  // <d_z, r·acc> = <r·d_z, acc>
    }
    EXPECT_NEAR(gradient["dot_z"].value(0, i).value, dot, 1e-5) << i;
    for (int64_t f = 0; f < kHidden; ++f)
      EXPECT_NEAR(gradient["y"].value(i, f).value, outputs["y"].value(i, f).value, 1e-6) << i << ", " << f;
  }
}

}  // namespace
}  // namespace coda::test
