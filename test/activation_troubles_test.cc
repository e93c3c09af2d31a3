// Troubles that users of other implementations of activations have had: one test each, with the numbers worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "coda/gemm.h"
#include "coda/interleave.h"
#include "coda/programs/activation.h"
#include "coda/programs/swiglu.h"

namespace coda {
namespace {

using F = Tensors<float>;

/// y = f(gate, up) and its gradients for d_y = 1, as the programs on the engine make them.
struct Result {
  float y, d_gate, d_up;
};
template <class Function>
Result gated(Function f, float gate, float up) {
  Cpu cpu(1);
  std::vector<float> z(16, 0.f), kept(16), y(8), again(8), d_z(16), ones(8, 1.f), dot(1);
  z[0] = gate;
  z[8] = up;
  const std::vector<float> r{1};
  map(cpu, Matrix<const float>(z.data(), 1, 16),
      RmsNormGlu<F, Function>{
          .f = f, .inv_rms = {r.data(), 1}, .gate_up = {kept.data(), 1, 16}, .y = {y.data(), 1, 8}});
  map(cpu, Matrix<const float>(ones.data(), 1, 8),
      GluBackward<F, Function>{.f = f,
                               .inv_rms = {r.data(), 1},
                               .gate_up = {kept.data(), 1, 16},
                               .d_gate_up = {d_z.data(), 1, 16},
                               .y = {again.data(), 1, 8},
                               .dot_z = {dot.data(), 1, 1}});
  EXPECT_EQ(y[0], again[0]);
  return {y[0], d_z[0], d_z[8]};
}
template <class Function>
float ungated(float x) {
  Cpu cpu(1);
  const std::vector<float> r{1};
  float y = NAN;
  if constexpr (std::is_same_v<Function, SquaredRelu>) {
    map(cpu, Matrix<const float>(&x, 1, 1),
        Activated<F, Function, NormInFront, WithoutBias>{
            .f = {}, .inv_rms = {r.data(), 1}, .z = {&x, 1, 1}, .y = {&y, 1, 1}});
  } else if constexpr (std::is_same_v<Function, GeluErf>) {
    const float no_bias = 0;
    map(cpu, Matrix<const float>(&x, 1, 1),
        Activated<F, Function, NoNormInFront, WithBias>{
            .f = {}, .bias = {&no_bias, 1}, .z = {&x, 1, 1}, .y = {&y, 1, 1}});
  } else {
    const float no_bias = 0;
    map(cpu, Matrix<const float>(&x, 1, 1),
        Activated<F, Function, NormInFront, WithBias, DropInput>{
            .f = {}, .inv_rms = {r.data(), 1}, .bias = {&no_bias, 1}, .y = {&y, 1, 1}});
  }
  return y;
}

TEST(ActivationTroubles, ClampedValuesHaveNoGradient) {
  const Result both = gated(SwigluClamped{.limit = 7, .alpha = 1.702f}, 9, -9);
  EXPECT_NEAR(both.y, -41.99972, 5e-6);
  EXPECT_EQ(both.d_gate, 0);
  EXPECT_EQ(both.d_up, 0);
  // The gate is clamped above only.
  const Result low = gated(SwigluClamped{.limit = 7, .alpha = 1.702f}, -9, 2);
  EXPECT_NEAR(low.y, -9 / (1 + std::exp(9 * 1.702)) * 3, 1e-10);
  EXPECT_NE(low.d_gate, 0);
  EXPECT_NE(low.d_up, 0);
}

/// A limit that nobody gave was taken for 0.
TEST(ActivationTroubles, NoLimitNoClamp) {
  const Result free = gated(SwigluClamped{}, 9, -9);
  const double s = 1 / (1 + std::exp(-9 * 1.702));
  EXPECT_NEAR(free.y, 9 * s * -8, 1e-5);
  EXPECT_NEAR(free.d_gate, -8 * s * (1 + 1.702 * 9 * (1 - s)), 1e-5);
  EXPECT_NEAR(free.d_up, 9 * s, 1e-5);
}

/// The two GELUs under one name.
TEST(ActivationTroubles, ErfAndTanhAreTwoGelus) {
  EXPECT_NEAR(ungated<GeluErf>(-2.7f), -0.0093608, 5e-8);
  EXPECT_NEAR(ungated<GeluTanh>(-2.7f), -0.0088876, 5e-8);
  EXPECT_NEAR(gated(GegluErf{}, -2.7f, 2).y, 2 * -0.0093608, 1e-7);
  EXPECT_NEAR(gated(GegluTanh{}, -2.7f, 2).y, 2 * -0.0088876, 1e-7);
}

TEST(ActivationTroubles, SquaredReluIsSquared) {
  EXPECT_EQ(ungated<SquaredRelu>(3), 9);
  EXPECT_EQ(ungated<SquaredRelu>(-3), 0);
}

/// gate and up one behind the other read as neighbours, or in the other order. Here they are packed from two matrices by name, and
/// a view says where a checkpoint has them.
TEST(ActivationTroubles, GateAndUpArePackedByName) {
  constexpr int64_t kHidden = 8;
  const auto packed_y = [](Matrix<const float> gate, Matrix<const float> up) {
    Cpu cpu(1);
    std::vector<float> packed(2 * kHidden), y(kHidden);
    interleave(gate, up, Matrix<float>(packed.data(), 2 * kHidden, 1));
    const std::vector<float> x{1}, r{1};
    gemm(cpu, Matrix<const float>(x.data(), 1, 1), Matrix<const float>(packed.data(), 2 * kHidden, 1),
         RmsNormSwiGlu<F, DropGateUp>{.inv_rms = {r.data(), 1}, .y = {y.data(), 1, kHidden}});
    return y;
  };
  std::vector<float> concatenated(2 * kHidden, 0.f), neighbours(2 * kHidden, 0.f);
  for (int64_t i = 0; i < 2; ++i) {
    const float gate = static_cast<float>(1 + i), up = static_cast<float>(3 + i);
    concatenated[i] = neighbours[2 * i] = gate;
    concatenated[kHidden + i] = neighbours[2 * i + 1] = up;
  }
  const Matrix<const float> both(concatenated.data(), 2 * kHidden, 1);
  const auto a = packed_y(both.row_range(0, kHidden), both.row_range(kHidden, kHidden));
  const auto b = packed_y({neighbours.data(), kHidden, 1, 2}, {neighbours.data() + 1, kHidden, 1, 2});
  for (const auto& y : {a, b}) {
    EXPECT_NEAR(y[0], 2.193176, 5e-7);
    EXPECT_NEAR(y[1], 7.046377, 1e-6);
  }
  const auto swapped = packed_y(both.row_range(kHidden, kHidden), both.row_range(0, kHidden));
  EXPECT_GT(std::fabs(swapped[0] - a[0]), 0.1);
  // One matrix of both, or halves that are not, cannot be packed at all.
  std::vector<float> packed(2 * kHidden);
  EXPECT_THROW(interleave(both, both.row_range(0, kHidden), Matrix<float>(packed.data(), 2 * kHidden, 1)),
               OperandError);
  EXPECT_THROW(interleave(both.row_range(0, 4), both.row_range(4, 4), Matrix<float>(packed.data(), 8, 1)),
               OperandError);
}

}  // namespace
}  // namespace coda
