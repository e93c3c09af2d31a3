// Rotary positions with a norm over every head of q and k, on the CPU engine against the oracle, and the backward program
// against the derivative of the forward.
#include "coda/programs/head_norm.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;

/// A derivative by one element of gamma.
struct MovesGamma {
  int64_t col;
  Dual<double, 1> operator()(double value, std::string_view field, int64_t, int64_t at) const {
    Dual<double, 1> x(value);
    if (field == "gamma" && at == col) x.slope[0] = 1;
    return x;
  }
};

/// With L = Σ d·qkv: d_qkv is dL/dacc, d_gamma dL/dgamma, dot = Σ dL/dacc·acc.
template <class Width>
void backward_is_the_derivative() {
  Random random(5);
  constexpr int64_t kRows = 2, kCols = 2 * Width::value + 32;  // q, k, and a v that is no whole head
  Case<HeadNormRope<F, Width>> forward(kRows, kCols, random);
  forward.template map<float>();
  forward.program().normed_columns = 2 * Width::value;
  Case<HeadNormRopeBackward<F, Width>> backward(kRows, kCols, random);
  backward.template map<float>();
  auto& f = forward.program();
  auto& b = backward.program();
  b.eps = f.eps;
  b.normed_columns = f.normed_columns;
  b.inv_rms = f.inv_rms;
  b.position = f.position;
  b.turns_high = f.turns_high;
  b.turns_low = f.turns_low;
  b.gamma = f.gamma;
  const auto z = forward.expected()["z"].value;
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) const_cast<float&>(b.z(i, j)) = static_cast<float>(z(i, j).value);
  backward.remember();
  const auto gradient = backward.expected();
  const auto along = [&](const oracle::Outputs<Dual<double, 1>>& moved, int64_t row) {
    double slope = 0;
    for (int64_t c = 0; c < kCols; ++c) slope += backward.acc()(row, c).value * moved["qkv"].value(row, c).slope[0];
    return slope;
  };
  for (int64_t i = 0; i < kRows; ++i) {
    double dot = 0, got_dot = 0;
    for (int64_t j = 0; j < kCols; ++j) {
      const double slope =
          along(derivative(forward, [&](int64_t row, int64_t col) { return row == i && col == j; }), i);
      EXPECT_NEAR(gradient["d_qkv"].value(i, j).value, slope, 2e-6) << i << ", " << j;
      dot += slope * forward.acc()(i, j).value;
    }
    for (int64_t slot = 0; slot < gradient["dot"].value.rows; ++slot) got_dot += gradient["dot"].value(slot, i).value;
    EXPECT_NEAR(got_dot, dot, 2e-5) << i;
  }
  oracle::Grid<Dual<double, 1>> acc(kRows, kCols);
  for (size_t i = 0; i < acc.values.size(); ++i) acc.values[i] = forward.acc().values[i].value;
  for (int64_t j = 0; j < kCols; ++j) {
    const auto moved = oracle::apply<Dual<double, 1>>(acc, f, MovesGamma{j});
    double slope = 0;
    for (int64_t i = 0; i < kRows; ++i) slope += along(moved, i);
    EXPECT_NEAR(gradient["d_gamma"].value(0, j).value, slope, 2e-6) << j;
  }
}
TEST(HeadNormRopeBackward_, IsTheDerivativeOfTheForwardProgram) {
  backward_is_the_derivative<HeadWidth<64>>();
  backward_is_the_derivative<HeadWidth<128>>();
}

/// v is the last of the row and is only scaled by the norm in front of the product.
TEST(HeadNormRope_V, PassesThrough) {
  Random random(6);
  constexpr int64_t kRows = 3, kCols = 192;
  Case<HeadNormRope<F, HeadWidth<64>>> c(kRows, kCols, random);
  c.map<float>();
  c.program().normed_columns = 128;
  for (int64_t pair = 0; pair < c.program().turns_high.size; ++pair) {
    const_cast<float&>(c.program().turns_high[pair]) = 0;
    const_cast<float&>(c.program().turns_low[pair]) = 0;
  }
  c.remember();
  c.run(pool(1));
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 128; j < kCols; ++j) EXPECT_EQ(c.program().qkv(i, j), c.program().z(i, j)) << i << ", " << j;
    for (int64_t head = 0; head < 2; ++head) {
      double before = 0, after = 0;
      for (int64_t j = 64 * head; j < 64 * (head + 1); ++j) {
        const double unit = double(c.program().qkv(i, j)) / double(c.program().gamma[j]), z = c.program().z(i, j);
        before += z * z / 64;
        after += unit * unit / 64;
      }
      EXPECT_NEAR(after, before / (before + double(c.program().eps)), 1e-5) << "head " << head;
    }
  }
}

}  // namespace
}  // namespace coda::test
