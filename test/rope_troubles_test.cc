// Troubles that users of other implementations of rotary positions have had: one test each, with the numbers worked out by
// hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/programs/rope.h"
#include "coda/rotary.h"

namespace coda {
namespace {

using F = Tensors<float>;

/// Heads [M, N] in packed order, turned to their positions.
std::vector<float> turned(const std::vector<float>& x, const std::vector<int32_t>& position,
                          const std::vector<float>& radians) {
  Cpu cpu(1);
  const auto m = static_cast<int64_t>(position.size()), n = static_cast<int64_t>(x.size()) / m;
  const RotaryTurns turns = to_turns(radians);
  const std::vector<float> ones(x.size(), 1.f);
  std::vector<float> y(x.size(), NAN);
  const auto pairs = static_cast<int64_t>(radians.size());
  map(cpu, Matrix<const float>(x.data(), m, n),
      RmsNormRope<F>{.inv_rms = {ones.data(), m},
                     .position = {position.data(), m},
                     .turns_high = {turns.high.data(), pairs},
                     .turns_low = {turns.low.data(), pairs},
                     .qkv = {y.data(), m, n}});
  return y;
}
/// And back, as the backward pass turns a gradient.
std::vector<float> turned_back(const std::vector<float>& d, const std::vector<int32_t>& position,
                               const std::vector<float>& radians) {
  Cpu cpu(1);
  const auto m = static_cast<int64_t>(position.size()), n = static_cast<int64_t>(d.size()) / m;
  const RotaryTurns turns = to_turns(radians);
  const std::vector<float> ones(d.size(), 1.f);
  std::vector<float> d_qkv(d.size(), NAN), dot(m);
  const auto pairs = static_cast<int64_t>(radians.size());
  map(cpu, Matrix<const float>(d.data(), m, n),
      RopeBackward<F>{.inv_rms = {ones.data(), m},
                      .position = {position.data(), m},
                      .turns_high = {turns.high.data(), pairs},
                      .turns_low = {turns.low.data(), pairs},
                      .qkv = {ones.data(), m, n},
                      .d_qkv = {d_qkv.data(), m, n},
                      .dot = {dot.data(), 1, m}});
  return d_qkv;
}

std::vector<float> packed(const std::vector<float>& plain, const RotaryHead& head) {
  std::vector<float> out(plain.size());
  const auto rows = static_cast<int64_t>(plain.size());
  pack_heads(Matrix<const float>(plain.data(), rows, 1), head, Matrix<float>(out.data(), rows, 1));
  return out;
}
std::vector<float> unpacked(const std::vector<float>& x, const RotaryHead& head) {
  std::vector<float> out(x.size());
  const auto rows = static_cast<int64_t>(x.size());
  unpack_heads(Matrix<const float>(x.data(), rows, 1), head, Matrix<float>(out.data(), rows, 1));
  return out;
}

constexpr RotaryHead kHalfSplit{.width = 16, .rotary = 16, .layout = RotaryLayout::half_split};
constexpr RotaryHead kInterleaved{.width = 16, .rotary = 16, .layout = RotaryLayout::interleaved};

/// Weights in one layout under the other's rotation: fluent nonsense.
TEST(RopeTroubles, BothLayoutsAndFromOneToTheOther) {
  // q = [1, 2, 3, 4] of a head of 4, base 1e4, at position 1, as the first two pairs of a head of 16: the others are 0.
  std::vector<float> radians(8);
  radians[0] = 1;
  radians[1] = 0.01f;
  std::vector<float> half(16), interleaved(16);
  half[0] = interleaved[0] = 1;
  half[1] = interleaved[1] = 2;
  half[8] = interleaved[2] = 3;
  half[9] = interleaved[3] = 4;
  const auto y = unpacked(turned(packed(half, kHalfSplit), {1}, radians), kHalfSplit);
  EXPECT_NEAR(y[0], -1.98411, 5e-6);
  EXPECT_NEAR(y[1], 1.95990, 5e-6);
  EXPECT_NEAR(y[8], 2.46238, 5e-6);
  EXPECT_NEAR(y[9], 4.01980, 5e-6);
  const auto z = unpacked(turned(packed(interleaved, kInterleaved), {1}, radians), kInterleaved);
  EXPECT_NEAR(z[0], -1.14264, 5e-6);
  EXPECT_NEAR(z[1], 1.92208, 5e-6);
  EXPECT_NEAR(z[2], 2.95985, 5e-6);
  EXPECT_NEAR(z[3], 4.02980, 5e-6);

  // The rows of a weight for the one are those for the other in another order: packed they are the same.
  std::vector<float> rows(32);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  const auto other = unpacked(packed(rows, kInterleaved), kHalfSplit);
  for (size_t head = 0; head < 32; head += 16)
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(other[head + i], static_cast<float>(head + 2 * i));
      EXPECT_EQ(other[head + 8 + i], static_cast<float>(head + 2 * i + 1));
    }
  EXPECT_EQ(unpacked(packed(other, kHalfSplit), kInterleaved), rows);
}

/// The first row's positions used for all; packed documents that keep counting.
TEST(RopeTroubles, EveryTokenHasAPositionOfItsOwn) {
  const std::vector<float> radians = rotary_frequencies(16, 16, 1e4);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const std::vector<int32_t>& position :
       {std::vector<int32_t>{0, 1, 2, 5, 6, 7}, std::vector<int32_t>{0, 1, 2, 0, 1}}) {
    std::vector<float> x(16 * position.size());
    for (float& v : x) v = normal(random);
    const auto y = turned(x, position, radians);
    for (size_t i = 0; i < position.size(); ++i)
      for (size_t p = 0; p < 8; ++p) {
        const double angle = position[i] * std::pow(1e4, -static_cast<double>(p) / 8);
        const double a = x[16 * i + p], b = x[16 * i + 8 + p];
        EXPECT_NEAR(y[16 * i + p], a * std::cos(angle) - b * std::sin(angle), 1e-6) << i << ", " << p;
        EXPECT_NEAR(y[16 * i + 8 + p], b * std::cos(angle) + a * std::sin(angle), 1e-6) << i << ", " << p;
      }
    // The backward pass turns by the negative.
    const auto back = turned_back(y, position, radians);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], 1e-6) << i;
  }
}

/// Positions or angles in bf16, or a fast sine of a large angle.
TEST(RopeTroubles, LongPositionsKeepTheirAngle) {
  std::vector<float> x(16, 0.f);
  x[0] = 1;
  std::vector<float> radians(8, 0.f);
  radians[0] = 1;
  for (const auto& [position, cosine] :
       {std::pair<int32_t, double>{257, 0.819306}, {15962, -0.908016}, {131071, -0.817983}}) {
    const auto y = turned(x, {position}, radians);
    EXPECT_NEAR(y[0], cosine, 1e-5) << position;
    EXPECT_NEAR(y[8], std::sin(static_cast<double>(position)), 1e-6) << position;
  }
}

/// Partial rotary embeddings: what lies behind the rotary width comes through bit for bit, in both layouts.
TEST(RopeTroubles, PartialRotationLeavesTheRestAlone) {
  constexpr int64_t kWidth = 48, kRotary = 32;
  const std::vector<float> radians = rotary_frequencies(kWidth, kRotary, 1e4);
  ASSERT_EQ(radians.size(), 24U);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(kWidth);
  for (float& v : x) v = normal(random);
  for (const RotaryLayout layout : {RotaryLayout::half_split, RotaryLayout::interleaved}) {
    const RotaryHead head{.width = kWidth, .rotary = kRotary, .layout = layout};
    const auto y = unpacked(turned(packed(x, head), {1000}, radians), head);
    for (size_t p = 0; p < kRotary / 2; ++p) {
      const size_t first = layout == RotaryLayout::half_split ? p : 2 * p,
                   second = layout == RotaryLayout::half_split ? p + kRotary / 2 : 2 * p + 1;
      // The frequency is a float; a thousand positions make its rounding a thousand times as large.
      const double angle = 1000 * static_cast<double>(static_cast<float>(std::pow(1e4, -2.0 * double(p) / kRotary)));
      EXPECT_NEAR(y[first], x[first] * std::cos(angle) - x[second] * std::sin(angle), 1e-6) << p;
      EXPECT_NEAR(y[second], x[second] * std::cos(angle) + x[first] * std::sin(angle), 1e-6) << p;
    }
    for (size_t i = kRotary; i < kWidth; ++i) EXPECT_EQ(y[i], x[i]) << i;
  }
}

TEST(RopeTroubles, WidthsThatCannotBeAreNamed) {
  const auto refused = [](int64_t width, int64_t rotary, const char* what) {
    try {
      rotary_frequencies(width, rotary, 1e4);
      ADD_FAILURE() << what;
    } catch (const UsageError& e) {
      EXPECT_STREQ(e.what(), what);
    }
  };
  refused(24, 8, "a head is 24 wide; rotary positions need a multiple of 16");
  refused(64, 80, "the rotary width is 80; it needs to be a multiple of 16, at most the head's 64");
  refused(64, 20, "the rotary width is 20; it needs to be a multiple of 16, at most the head's 64");
  std::vector<float> x(24), y(24);
  EXPECT_THROW(pack_heads(Matrix<const float>(x.data(), 24, 1), kHalfSplit, Matrix<float>(y.data(), 24, 1)),
               OperandError);
}

}  // namespace
}  // namespace coda
