// The programs of activations of one value, with a norm in front or not and with a bias or not, on the CPU engine against the
// oracle, and the backward ones against the derivative of the forward.
#include "coda/programs/activation.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

/// With L = Σ d_y·y: d_z is dL/dacc, d_bias dL/dbias, dot_z = Σ dL/dacc · acc.
template <class Function, class Norm, class Bias>
void backward_is_the_derivative() {
  Random random(5);
  constexpr int64_t kRows = 3, kCols = 20;
  Case<Activated<F, Function, Norm, Bias>> forward(kRows, kCols, random);
  forward.template map<float>();
  Case<ActivatedBackward<F, Function, Norm, Bias>> backward(kRows, kCols, random);
  backward.template map<float>();
  backward.program().inv_rms = forward.program().inv_rms;
  backward.program().bias = forward.program().bias;
  const auto z = forward.expected()["z"].value;
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j)
      const_cast<float&>(backward.program().z(i, j)) = static_cast<float>(z(i, j).value);
  backward.remember();
  const auto gradient = backward.expected();
  std::vector<double> dot(kRows), d_bias(kCols);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) {
      const auto moved = derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; });
      const double slope = backward.acc()(i, j).value * moved["y"].value(i, j).slope[0];
      EXPECT_NEAR(gradient["d_z"].value(i, j).value, slope, 2e-6) << i << ", " << j;
      dot[i] += slope * forward.acc()(i, j).value;
      if constexpr (Norm::value)
        d_bias[j] += slope / double(forward.program().inv_rms[i]);
      else
        d_bias[j] += slope;
    }
  if constexpr (Norm::value) {
    for (int64_t i = 0; i < kRows; ++i) EXPECT_NEAR(gradient["dot_z"].value(0, i).value, dot[i], 1e-5) << i;
  }
  if constexpr (Bias::value) {
    for (int64_t j = 0; j < kCols; ++j) EXPECT_NEAR(gradient["d_bias"].value(0, j).value, d_bias[j], 1e-5) << j;
  }
}
TEST(ActivatedBackward_, IsTheDerivativeOfTheForwardProgram) {
  backward_is_the_derivative<SquaredRelu, NormInFront, WithoutBias>();
  backward_is_the_derivative<GeluErf, NoNormInFront, WithBias>();
  backward_is_the_derivative<GeluTanh, NormInFront, WithBias>();
}

}  // namespace
}  // namespace coda::test
