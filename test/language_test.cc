// The language itself: what describe() says of every program, numbers and functions on every type that a program runs on, and
// derivatives.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "coda/gemm.h"
#include "coda/isa.h"
#include "coda/program.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "coda/vjp.h"
#include "cpu/isa.h"
#include "language_lanes.h"
#include "oracle/oracle.h"
#include "verify/bounded.h"

namespace coda::test {
namespace {

using verify::kFloatRounding;
using verify::kFunctionError;
using verify::kRotationError;

// ---- describe

std::string text(const Field& field) {
  static const std::map<Kind, std::string> kKinds = {{Kind::per_row, "PerRow"},
                                                     {Kind::per_col, "PerCol"},
                                                     {Kind::per_pair, "PerPair"},
                                                     {Kind::scalar, "Scalar"},
                                                     {Kind::device_scalar, "DeviceScalar"},
                                                     {Kind::tile, "Tile"},
                                                     {Kind::half_tile, "HalfTile"},
                                                     {Kind::double_tile, "DoubleTile"},
                                                     {Kind::accumulate, "Accumulate"},
                                                     {Kind::row_sum, "RowSum"},
                                                     {Kind::row_max, "RowMax"},
                                                     {Kind::col_sum, "ColSum"},
                                                     {Kind::row_log_sum_exp, "RowLogSumExp"},
                                                     {Kind::off, "Off"},
                                                     {Kind::number, "number"}};
  static const std::map<ElementType, std::string> kElements = {{ElementType::float32, "float"},
                                                               {ElementType::bfloat16, "bf16"},
                                                               {ElementType::int32, "int32"},
                                                               {ElementType::max_sum, "MaxSum"}};
  const std::string direction = field.direction == Direction::in    ? "In"
                                : field.direction == Direction::out ? "Out"
                                                                    : "Local";
  return direction + " " + kKinds.at(field.kind) + " " + kElements.at(field.element) +
         (field.extent > 0 ? " " + std::to_string(field.extent) : "") + " " + std::string(field.name) + "; ";
}
template <class P>
std::string description() {
  std::string all;
  for (const Field& field : describe<P>()) all += text(field);
  return all;
}

TEST(Describe, EveryProgram) {
  using B = Tensors<bf16>;
  using F = Tensors<float>;
  EXPECT_EQ(description<Store<B>>(), "Out Tile bf16 out; ");
  EXPECT_EQ(description<Store<F>>(), "Out Tile float out; ");
  EXPECT_EQ((description<Store<B, float>>()), "Out Tile float out; ");
  EXPECT_EQ(description<AccumulateInto<B>>(), "Out Accumulate float out; ");
  EXPECT_EQ(
      description<Residual<B>>(),
      "In Tile bf16 residual; In Off float gamma; Out Tile bf16 h; Out Off float x; Out RowSum float 128 sum_sq; ");
  EXPECT_EQ((description<Residual<F, GammaInEpilogue>>()),
            "In Tile float residual; In PerCol float gamma; Out Tile float h; Out Tile float x; "
            "Out RowSum float 128 sum_sq; ");
  EXPECT_EQ(description<RmsNorm<B>>(), "In PerRow float inv_rms; Out Tile bf16 y; ");
  EXPECT_EQ((description<RmsNormBackward<B, StreamEnds, GammaInEpilogue>>()),
            "In PerRow float inv_rms; In PerRow float mean_dot; In Tile bf16 h; In Off float d_residual; "
            "In PerCol float gamma; Out Tile bf16 d_h; Out ColSum float 64 d_gamma; ");
  EXPECT_EQ(description<RmsNormBackward<B>>(),
            "In PerRow float inv_rms; In PerRow float mean_dot; In Tile bf16 h; In Tile bf16 d_residual; "
            "In Off float gamma; Out Tile bf16 d_h; Out Off float d_gamma; ");
  EXPECT_EQ(description<RmsNormSwiGlu<B>>(),
            "In number float f; In PerRow float inv_rms; Out Tile bf16 gate_up; Out HalfTile bf16 y; ");
  EXPECT_EQ((description<RmsNormSwiGlu<B, DropGateUp>>()),
            "In number float f; In PerRow float inv_rms; Out Off float gate_up; Out HalfTile bf16 y; ");
  EXPECT_EQ(description<SwiGluBackward<B>>(),
            "In number float f; In PerRow float inv_rms; In DoubleTile bf16 gate_up; Out DoubleTile bf16 d_gate_up; "
            "Out Tile bf16 y; "
            "Out RowSum float 128 dot_z; ");
  EXPECT_EQ(
      description<RmsNormRope<B>>(),
      "In PerRow float inv_rms; In PerRow int32 position; In PerPair float turns_high; In PerPair float turns_low; "
      "In Off float bias; Out Tile bf16 qkv; ");
  EXPECT_EQ(
      description<RopeBackward<B>>(),
      "In PerRow float inv_rms; In PerRow int32 position; In PerPair float turns_high; In PerPair float turns_low; "
      "In Off float bias; In Tile bf16 qkv; Out Tile bf16 d_qkv; Out Off float d_bias; Out RowSum float 128 dot; ");
  EXPECT_EQ(description<CrossEntropy<B>>(),
            "In number float f; In PerRow float inv_rms; In PerRow int32 label; Local RowMax float 128 group_max; "
            "Out RowMax float 128 maxima; Out Tile bf16 relative_logits; Out RowLogSumExp MaxSum 128 log_sum_exp; "
            "Out RowSum float 128 label_logit; Out Off float logit_sum; ");
  EXPECT_EQ((description<CrossEntropyBackward<F, RecomputeLogits>>()),
            "In number float f; In PerRow float inv_rms; In PerRow int32 label; In PerRow float log_sum_exp; "
            "In PerRow float d_log_sum_exp; In PerRow float d_label_logit; In Off float d_logit_sum; "
            "In Off float maxima; Out Tile float d_logits; Out RowSum float 128 dot; ");
}

TEST(Describe, WhoTakesPairs) {
  EXPECT_TRUE(takes_pairs<RmsNormSwiGlu<Tensors<bf16>>>);
  EXPECT_TRUE(takes_pairs<RopeBackward<Tensors<float>>>);
  EXPECT_FALSE(takes_pairs<SwiGluBackward<Tensors<bf16>>>);
  EXPECT_FALSE(takes_pairs<CrossEntropy<Tensors<bf16>>>);
}

/// A program's function object is a field like any other, with the numbers that it has.
TEST(Describe, FunctionObjectsAreFields) {
  using P = GluBackward<Tensors<float>, SwigluClamped>;
  constexpr auto fields = describe<P>();
  EXPECT_EQ(fields[0].name, "f");
  EXPECT_EQ(fields[0].kind, Kind::number);
  const Field& field = fields[0];
  const coda::detail::Operand operand = coda::detail::operand(field, SwigluClamped{.limit = 7});
  EXPECT_EQ(operand.data, nullptr);
  GluBackward<Registers<double, float>, SwigluClamped> program{
      .f = {.limit = 2, .alpha = 1}, .inv_rms = 1, .gate_up = {3, 0.5}, .d_gate_up = {}, .y = {}, .dot_z = {}};
  program(1);
  EXPECT_NEAR(program.y, 2 / (1 + std::exp(-2.0)) * 1.5, 1e-15);
}

// ---- bf16

/// The nearest bf16 by search among the neighbours of the cut-off value; of two as near, the one whose last bit is 0.
uint16_t nearest_bf16(float x) {
  const auto cut = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  // One past the largest finite value stands for where infinity would be were the exponent not to end.
  const auto at = [](uint32_t bits) {
    const double v = std::bit_cast<float>(bits << 16);
    return std::isinf(v) ? std::copysign(0x1p128, v) : v;
  };
  const double below = std::fabs(double(x) - at(cut)), above = std::fabs(double(x) - at(cut + 1U));
  return below < above || (below == above && cut % 2 == 0) ? cut : static_cast<uint16_t>(cut + 1);
}

TEST(Bf16, EveryPatternComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 x;
    x.bits = static_cast<uint16_t>(bits);
    const auto value = float(x);
    if (std::isnan(value))
      EXPECT_EQ(bf16(value).bits, bits | 0x40) << bits;  // quiet, otherwise the same
    else
      EXPECT_EQ(bf16(value).bits, bits) << bits;
  }
}

/// Each bf16 value and what lies above it: just above, just below, at and just above the middle to the next.
std::vector<float> around_every_bf16() {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 0x10000; ++bits)
    for (uint32_t low : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU})
      all.push_back(std::bit_cast<float>(bits << 16 | low));
  return all;
}

TEST(Bf16, RoundsToNearestTiesToEven) {
  for (float x : around_every_bf16()) {
    if (std::isnan(x))
      EXPECT_TRUE(std::isnan(float(bf16(x)))) << std::bit_cast<uint32_t>(x);
    else if (std::isinf(x))
      EXPECT_EQ(float(bf16(x)), x);
    else
      EXPECT_EQ(bf16(x).bits, nearest_bf16(x)) << x;
  }
}

// ---- pairs and scalar functions

template <class T>
class Reals : public testing::Test {};
using RealTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(Reals, RealTypes);

TYPED_TEST(Reals, Pairs) {
  using T = TypeParam;
  const Pair<T> a{1, 2}, b{3, 5};
  const auto same = [](Pair<T> x, T first, T second) { return x.first == first && x.second == second; };
  EXPECT_TRUE(same(a + b, 4, 7));
  EXPECT_TRUE(same(a - b, -2, -3));
  EXPECT_TRUE(same(a * b, 3, 10));
  EXPECT_TRUE(same(2.f * a, 2, 4));
  EXPECT_TRUE(same(a * T(3), 3, 6));
  EXPECT_EQ(dot(a, b), 13);
}

TYPED_TEST(Reals, Functions) {
  using T = TypeParam;
  EXPECT_EQ(select(true, T(1), 2.f), 1);
  EXPECT_EQ(select(false, T(1), 2.f), 2);
  EXPECT_EQ(min(T(1), 2.f), 1);
  EXPECT_EQ(max(T(1), 2.f), 2);
  EXPECT_EQ(abs(T(-3)), 3);
  EXPECT_EQ(rint(T(2.5)), 2);
  EXPECT_EQ(rint(T(3.5)), 4);
  EXPECT_EQ(to_real(Index<T>{7}), T(7));
  EXPECT_EQ(sigmoid(T(0)), T(0.5));
  EXPECT_NEAR(sigmoid(T(2)), 1 / (1 + std::exp(-2.0)), 1e-7);
  EXPECT_NEAR(silu(T(-3)), -3 / (1 + std::exp(3.0)), 1e-7);
  EXPECT_EQ(rounded<bf16>(T(1.00390625)), T(1));         // half way, to even
  EXPECT_EQ(rounded<bf16>(T(1.01171875)), T(1.015625));  // half way, to even
  EXPECT_EQ(rounded<float>(T(1.5)), T(1.5));
}

// ---- rotary positions

/// (high, low) of a frequency in radians per position.
std::pair<float, float> turns(double radians) {
  const double exact = radians / (2 * M_PI);
  const auto high = static_cast<float>(exact);
  return {high, static_cast<float>(exact - high)};
}

struct Angle {
  int position;
  double cosine;
};
constexpr Angle kAngles[] = {{257, 0.819306}, {15962, -0.908016}, {131071, -0.817983}};

TYPED_TEST(Reals, RotationAtLargePositions) {
  using T = TypeParam;
  const auto [high, low] = turns(1);
  for (const auto& [position, cosine] : kAngles) {
    const auto [c, s] = rotation<T>(T(position), T(high), T(low));
    EXPECT_NEAR(c, cosine, 1e-5) << position;
    EXPECT_NEAR(c, std::cos(double(position)), 1e-6) << position;
    EXPECT_NEAR(s, std::sin(double(position)), 1e-6) << position;
  }
}

TYPED_TEST(Reals, RotaryLayouts) {
  using T = TypeParam;
  // d = 4, base 1e4, position 1, q = [1, 2, 3, 4].
  const auto [high0, low0] = turns(1);
  const auto [high1, low1] = turns(0.01);
  const Pair<T> angle0 = rotation<T>(1, high0, low0), angle1 = rotation<T>(1, high1, low1);
  const auto expect = [](Pair<T> z, double first, double second) {
    EXPECT_NEAR(z.first, first, 5e-6);
    EXPECT_NEAR(z.second, second, 5e-6);
  };
  // Half-split: the partners are d/2 apart.
  expect(rotate(Pair<T>{1, 3}, angle0), -1.98411, 2.46238);
  expect(rotate(Pair<T>{2, 4}, angle1), 1.95990, 4.01980);
  // Interleaved: they are neighbours.
  expect(rotate(Pair<T>{1, 2}, angle0), -1.14264, 1.92208);
  expect(rotate(Pair<T>{3, 4}, angle1), 2.95985, 4.02980);
  // And back.
  expect(unrotate(rotate(Pair<T>{3, 4}, angle0), angle0), 3, 4);
}

// ---- derivatives

struct Silu {
  template <class T>
  T operator()(T x) const {
    return silu(x);
  }
};
/// Every function that a dual number knows, in one formula.
struct Everything {
  template <class T>
  T operator()(T x) const {
    return exp(tanh(x)) * log(x * x + 2.f) / sqrt(abs(x) + 1.f) + erf(x) - max(x, 0.25f) * min(x, 2.f) + fma(x, x, -x) +
           select(x < T(0.f), x, -x) + rounded<float>(x) + rint(x);
  }
};
struct Turn {
  double cosine, sine;
  template <class T>
  Pair<T> operator()(Pair<T> z) const {
    return rotate(z, Pair<T>{T(cosine), T(sine)});
  }
};

TEST(Vjp, OfSiluIsItsDerivative) {
  for (double x : {-20.0, -3.0, -0.5, 0.0, 1e-3, 2.0, 15.0}) {
    const double s = 1 / (1 + std::exp(-x));
    EXPECT_NEAR(vjp(Silu{}, x, 3.0), 3 * s * (1 + x * (1 - s)), 1e-14) << x;
  }
}
TEST(Vjp, OfEveryFunction) {
  for (double x : {-2.3, -0.7, 0.1, 0.6, 1.9, 3.2}) {
    // rounded<float> is a staircase: a step of many floats averages it.
    const double step = 1e-4;
    const double slope = (Everything{}(x + step) - Everything{}(x - step)) / (2 * step);
    EXPECT_NEAR(vjp(Everything{}, x, 1.0), slope, 2e-3) << x;
  }
}
TEST(Vjp, OfCosSinTurns) {
  for (double x : {-0.4, -0.1, 0.0, 0.3, 0.5}) {
    const auto y = cos_sin_turns(Dual<double, 1>::variable(x, 0));
    EXPECT_NEAR(y.first.slope[0], -2 * M_PI * std::sin(2 * M_PI * x), 1e-12);
    EXPECT_NEAR(y.second.slope[0], 2 * M_PI * std::cos(2 * M_PI * x), 1e-12);
  }
}
TEST(Vjp, OfSwiGluIsItsDerivative) {
  for (double gate : {-4.0, -0.3, 0.0, 2.5})
    for (double up : {-1.5, 0.0, 0.7}) {
      const double s = 1 / (1 + std::exp(-gate));
      const auto d_z = vjp(Swiglu{}, Pair<double>{gate, up}, 2.0);
      EXPECT_NEAR(d_z.first, 2 * up * s * (1 + gate * (1 - s)), 1e-14);
      EXPECT_NEAR(d_z.second, 2 * gate * s, 1e-14);
    }
}
TEST(Vjp, OfARotationIsItsInverse) {
  const Turn turn{std::cos(0.7), std::sin(0.7)};
  const auto d_z = vjp(turn, Pair<double>{0.3, -1.2}, Pair<double>{2.0, 5.0});
  const auto back = unrotate(Pair<double>{2.0, 5.0}, Pair<double>{turn.cosine, turn.sine});
  EXPECT_NEAR(d_z.first, back.first, 1e-15);
  EXPECT_NEAR(d_z.second, back.second, 1e-15);
}
TEST(Vjp, SwiGluBackwardByHandIsTheSame) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(0, 3);
  for (int i = 0; i < 200; ++i) {
    using Side = Registers<double, float>;
    const double r = 0.7, d_y = normal(random);
    const Pair<double> z{normal(random), normal(random)};
    SwiGluBackward<Side> program{.inv_rms = r, .gate_up = z, .d_gate_up = {}, .y = {}, .dot_z = {}};
    program(d_y);
    const auto d_z = vjp(Swiglu{}, z, d_y);
    EXPECT_NEAR(program.d_gate_up.first, r * d_z.first, 1e-13);
    EXPECT_NEAR(program.d_gate_up.second, r * d_z.second, 1e-13);
    EXPECT_NEAR(program.y, Swiglu{}(z), 1e-13);
    EXPECT_NEAR(program.dot_z.value, dot(d_z, z), 1e-12);
  }
}

/// Its derivative by hand, told from the real one.
struct ByHand {
  template <class T>
  T operator()(Pair<T> z) const {
    return z.first * z.second;
  }
};
template <class T>
ValueAndGradient<T, Pair<T>> value_and_vjp(ByHand, Pair<T> z, std::type_identity_t<T> d_y) {
  return {z.first * z.second, {d_y * z.second + 100.f, d_y * z.first + 100.f}};
}
TEST(Vjp, ADerivativeByHandIsTheOneTaken) {
  GluBackward<Registers<double, float>, ByHand> program{
      .f = {}, .inv_rms = 1, .gate_up = {3, 5}, .d_gate_up = {}, .y = {}, .dot_z = {}};
  program(2);
  EXPECT_EQ(program.y, 15);
  EXPECT_EQ(program.d_gate_up.first, 110);
  EXPECT_EQ(program.d_gate_up.second, 106);
  const auto both = value_and_vjp(GegluErf{}, Pair<double>{0.3, -1.2}, 2.0);
  const auto d_z = vjp(GegluErf{}, Pair<double>{0.3, -1.2}, 2.0);
  EXPECT_EQ(both.value, GegluErf{}(Pair<double>{0.3, -1.2}));
  EXPECT_EQ(both.gradient.first, d_z.first);
  EXPECT_EQ(both.gradient.second, d_z.second);
}

// ---- lanes

struct Lanes {
  cpu::Isa isa;
  void (*apply)(Function, const float*, float*, int64_t);
  void (*apply3)(Function3, const float*, const float*, const float*, float*, int64_t);
  void (*load)(const bf16*, float*, int64_t);
  void (*store)(const float*, bf16*, int64_t);

  std::vector<float> operator()(Function f, const std::vector<float>& x) const {
    std::vector<float> y(x.size());
    apply(f, x.data(), y.data(), static_cast<int64_t>(x.size()));
    return y;
  }
  float operator()(Function3 f, float a, float b, float c) const {
    float y = 0;
    apply3(f, &a, &b, &c, &y, 1);
    return y;
  }
};
template <class Isa>
Lanes lanes_of(cpu::Isa isa) {
  return {isa, &OnLanes<Isa>::apply, &OnLanes<Isa>::apply, &OnLanes<Isa>::load, &OnLanes<Isa>::store};
}
/// For every instruction set that runs here.
template <class Body>
void on_all_lanes(const Body& body) {
  for (const Lanes& lanes : {lanes_of<isa::generic>(cpu::Isa::generic), lanes_of<isa::avx2>(cpu::Isa::avx2),
                             lanes_of<isa::avx512>(cpu::Isa::avx512)}) {
    if (!cpu::runs_here(lanes.isa)) continue;
    SCOPED_TRACE(std::string(cpu::name(lanes.isa)));
    body(lanes);
  }
}

/// Also ends that are no multiple of a register's width.
std::vector<float> points(double low, double high) {
  constexpr int kCount = 20011;
  std::vector<float> x;
  for (int i = 0; i < kCount; ++i) x.push_back(static_cast<float>(low + (high - low) * i / (kCount - 1)));
  return x;
}
/// The worst error of f over x, relative to the value or, where absolute is given, at least that.
template <class Want>
void expect_accurate(const Lanes& lanes, Function f, const std::vector<float>& x, const Want& want, double allowed,
                     double absolute = std::numeric_limits<float>::min()) {
  const std::vector<float> y = lanes(f, x);
  double worst = 0;
  size_t where = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = want(double(x[i]));
    const double error = std::fabs(y[i] - exact) / std::max(std::fabs(exact), absolute);
    if (!(error <= worst)) {
      worst = error;
      where = i;
    }
  }
  EXPECT_LE(worst, allowed) << "function " << static_cast<int>(f) << " at " << x[where] << " is " << y[where]
                            << ", not " << want(x[where]);
}

TEST(OnLanes_, FunctionsAreAccurate) {
  on_all_lanes([](const Lanes& lanes) {
    const auto exp = [](double x) { return std::exp(x); };
    expect_accurate(lanes, Function::exp, points(-87, 88), exp, kFunctionError);
    expect_accurate(lanes, Function::exp, points(-1, 1), exp, kFunctionError);
    const auto log = [](double x) { return std::log(x); };
    expect_accurate(lanes, Function::log, points(1e-3, 0.9), log, kFunctionError);
    expect_accurate(lanes, Function::log, points(1.1, 1e3), log, kFunctionError);
    expect_accurate(lanes, Function::log, points(1e-30, 1e30), log, kFunctionError);
    expect_accurate(lanes, Function::log, points(0.9, 1.1), log, kFunctionError, 0.1);  // about its zero
    expect_accurate(
        lanes, Function::sqrt, points(0, 100), [](double x) { return std::sqrt(x); }, kFloatRounding);
    expect_accurate(
        lanes, Function::tanh, points(-10, 10), [](double x) { return std::tanh(x); }, kFunctionError);
    expect_accurate(
        lanes, Function::erf, points(-5, 5), [](double x) { return std::erf(x); }, kFunctionError);
    const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    const auto silu = [&](double x) { return x * sigmoid(x); };
    const auto d_silu = [&](double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); };
    expect_accurate(lanes, Function::sigmoid, points(-80, 80), sigmoid, 2 * kFunctionError);
    expect_accurate(lanes, Function::silu, points(-80, 80), silu, 2 * kFunctionError);
    expect_accurate(lanes, Function::d_silu, points(-30, 30), d_silu, 4 * kFunctionError, 1);
    const auto d_tanh = [](double x) { return 1 - std::tanh(x) * std::tanh(x); };
    expect_accurate(lanes, Function::d_tanh, points(-8, 8), d_tanh, 2 * kFunctionError, 1);
    expect_accurate(
        lanes, Function::cos, points(-0.5, 0.5), [](double t) { return std::cos(2 * M_PI * t); }, kRotationError, 1);
    expect_accurate(
        lanes, Function::sin, points(-0.5, 0.5), [](double t) { return std::sin(2 * M_PI * t); }, kRotationError, 1);
  });
}

TEST(OnLanes_, EndsOfTheRange) {
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  on_all_lanes([](const Lanes& lanes) {
    EXPECT_EQ(lanes(Function::exp, {-kInfinity})[0], 0);
    EXPECT_EQ(lanes(Function::exp, {-200})[0], 0);
    EXPECT_EQ(lanes(Function::exp, {200})[0], kInfinity);
    EXPECT_EQ(lanes(Function::exp, {0})[0], 1);
    EXPECT_TRUE(std::isnan(lanes(Function::exp, {NAN})[0]));
    EXPECT_EQ(lanes(Function::log, {0})[0], -kInfinity);
    EXPECT_NEAR(lanes(Function::sigmoid, {-200})[0], 0, 0x1p-126);
    EXPECT_EQ(lanes(Function::sigmoid, {200})[0], 1);
    EXPECT_NEAR(lanes(Function::silu, {-200})[0], 0, 200 * 0x1p-126);
    EXPECT_EQ(lanes(Function::tanh, {100})[0], 1);
    EXPECT_EQ(lanes(Function::tanh, {-100})[0], -1);
    EXPECT_EQ(lanes(Function::erf, {100})[0], 1);
  });
}

TEST(OnLanes_, ExactOperations) {
  on_all_lanes([](const Lanes& lanes) {
    EXPECT_EQ(lanes(Function::rint, {-2.5, -1.5, -0.4, 0.5, 1.5, 2.5, 8388609, -1e9}),
              (std::vector<float>{-2, -2, 0, 0, 2, 2, 8388609, -1e9}));
    EXPECT_EQ(lanes(Function::abs, {-2, 3}), (std::vector<float>{2, 3}));
    EXPECT_EQ(lanes(Function3::min, 1, 2, 0), 1);
    EXPECT_EQ(lanes(Function3::max, 1, 2, 0), 2);
    EXPECT_EQ(lanes(Function3::select_less, 1, 2, 3), 3);
    EXPECT_EQ(lanes(Function3::select_less, 2, 2, 3), 0);
    EXPECT_EQ(lanes(Function3::add, 1, 2, 0), 3);
    EXPECT_EQ(lanes(Function3::subtract, 1, 2, 0), -1);
    EXPECT_EQ(lanes(Function3::multiply, 3, 2, 0), 6);
    EXPECT_EQ(lanes(Function3::divide, 3, 2, 0), 1.5);
    // The product has 47 bits; only its lower half is left.
    EXPECT_EQ(lanes(Function3::fma, 8388609, 8388609, -8388609.f * 8388609.f),
              std::fma(8388609.f, 8388609.f, -8388609.f * 8388609.f));
    EXPECT_NE(lanes(Function3::fma, 8388609, 8388609, -8388609.f * 8388609.f), 0);
  });
}

TEST(OnLanes_, RotationAtLargePositions) {
  const auto [high, low] = turns(1);
  on_all_lanes([high = high, low = low](const Lanes& lanes) {
    for (const auto& [position, cosine] : kAngles) {
      EXPECT_NEAR(lanes(Function3::rotation_cos, float(position), high, low), cosine, 1e-5) << position;
      EXPECT_NEAR(lanes(Function3::rotation_sin, float(position), high, low), std::sin(double(position)), 1e-6)
          << position;
    }
  });
}

TEST(OnLanes_, Bf16) {
  const std::vector<float> x = around_every_bf16();
  on_all_lanes([&x](const Lanes& lanes) {
    const std::vector<float> rounded = lanes(Function::round_to_bf16, x);
    std::vector<bf16> stored(x.size());
    lanes.store(x.data(), stored.data(), static_cast<int64_t>(x.size()));
    std::vector<float> loaded(x.size());
    lanes.load(stored.data(), loaded.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t want = bf16(x[i]).bits;
      ASSERT_EQ(stored[i].bits, want) << x[i];
      ASSERT_EQ(std::bit_cast<uint32_t>(rounded[i]), uint32_t{want} << 16) << x[i];
      ASSERT_EQ(std::bit_cast<uint32_t>(loaded[i]), uint32_t{want} << 16) << x[i];
    }
  });
}

}  // namespace
}  // namespace coda::test
