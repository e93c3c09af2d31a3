#include "coda/programs/norm.h"

#include <tuple>

#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// h = acc + residual, r = 1/sqrt(mean(h²) + eps), y = r ⊙ (x Wᵀ) with x = h or h ⊙ gamma, L = Σ d_y·y + Σ d_residual·h: the two
/// programs with a product and the second stage between them, differentiated by acc (which is by h) and by gamma.
template <class S, class Stream, class Gamma>
std::vector<Row> verify_norm(uint64_t seed) {
  using Forward = Residual<S, Gamma>;
  using Grid = oracle::Grid<double>;
  constexpr int64_t kRows = 70, kWidth = 40, kOutputs = 24;
  constexpr double kEps = 1e-2;
  Random random(seed);
  const auto normals = [&](int64_t rows, int64_t cols) {
    Grid grid(rows, cols);
    for (double& x : grid.values) x = normal(random);
    return grid;
  };
  const Grid w = normals(kOutputs, kWidth), d_y = normals(kRows, kOutputs), d_residual = normals(kRows, kWidth);
  Case<Forward> stream(kRows, kWidth, random);
  stream.template map<float>();
  Case<RmsNorm<S>> norm(kRows, kOutputs, random);
  norm.template map<float>();

  // h, inv_rms (1 row) and y, as numbers of T.
  const auto forward = [&]<class T>(const oracle::Grid<T>& acc, const auto& number) {
    const auto made = oracle::apply<T>(acc, stream.program(), number);
    const auto& x = made[Gamma::value ? "x" : "h"].value;
    oracle::Grid<T> r(1, kRows), products(kRows, kOutputs);
    for (int64_t i = 0; i < kRows; ++i) {
      r(0, i) = T(1.0) / sqrt(made["sum_sq"].value(0, i) * T(1.0 / kWidth) + T(kEps));
      for (int64_t o = 0; o < kOutputs; ++o)
        for (int64_t c = 0; c < kWidth; ++c) products(i, o) = products(i, o) + x(i, c) * T(w(o, c));
    }
    const auto y = oracle::apply<T>(products, norm.program(), [&](double, std::string_view, int64_t, int64_t i) {
      return r(0, i);  // its only operand
    });
    return std::tuple{made["h"].value, r, y["y"].value};
  };
  const auto slope_of_loss = [&](const auto& forward_values, int64_t i) {
    const auto& [h, r, y] = forward_values;
    double slope = 0;
    for (int64_t o = 0; o < kOutputs; ++o) slope += d_y(i, o) * y(i, o).slope[0];
    for (int64_t c = 0; c < kWidth && Stream::value; ++c) slope += d_residual(i, c) * h(i, c).slope[0];
    return slope;
  };

  Exact want{{"d_h", Grid(kRows, kWidth)}};
  if constexpr (Gamma::value) want["d_gamma"] = Grid(2, kWidth);
  for (int64_t j = 0; j < kWidth; ++j) {
    const auto by_h = forward(moved_accumulators<Slope>(stream, [j](int64_t, int64_t col) { return col == j; }),
                              oracle::AsStored<Slope>{});
    for (int64_t i = 0; i < kRows; ++i) want["d_h"](i, j) = slope_of_loss(by_h, i);
    if constexpr (Gamma::value) {
      const auto by_gamma = forward(moved_accumulators<Slope>(stream, [](int64_t, int64_t) { return false; }),
                                    [j](double value, std::string_view field, int64_t, int64_t col) {
                                      return field == "gamma" && col == j ? Slope::variable(value, 0) : Slope(value);
                                    });
      for (int64_t i = 0; i < kRows; ++i) want["d_gamma"](i / 64, j) += slope_of_loss(by_gamma, i);
    }
  }

  const auto [h, r, y] = forward(moved_accumulators<double>(stream, nullptr), oracle::AsStored<double>{});
  Grid mean_dot(1, kRows), d_x(kRows, kWidth);  // d_x = (r ⊙ d_y) W
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t o = 0; o < kOutputs; ++o) {
      mean_dot(0, i) += d_y(i, o) * y(i, o) / kWidth;
      for (int64_t c = 0; c < kWidth; ++c) d_x(i, c) += r(0, i) * d_y(i, o) * w(o, c);
    }
  Exact operands{{"inv_rms", r}, {"mean_dot", mean_dot}, {"h", h}, {kMapped, d_x}};
  if constexpr (Stream::value) operands["d_residual"] = d_residual;
  if constexpr (Gamma::value) operands["gamma"] = elements_of(stream, "gamma");
  Case<RmsNormBackward<S, Stream, Gamma>> backward(kRows, kWidth, random);
  backward.template map<float>();
  return verify_derivative<Forward>(backward, operands, want);
}

template <class S, class Stream, class Gamma>
void add_norm_derivative(Programs& programs) {
  add_derivative<Residual<S, Gamma>, RmsNormBackward<S, Stream, Gamma>>(programs, verify_norm<S, Stream, Gamma>);
}

template <class S>
void add(Programs& programs) {
  programs.add<Residual<S>>({{"h", "residual"}});
  programs.add<Residual<S, GammaInEpilogue>>({{"h", "residual"}});
  programs.add<Residual<S, GammaPlusOneInEpilogue>>({{"h", "residual"}});
  programs.add<SumOfSquares<S>>();
  programs.add<RmsNorm<S>>({{"y", kMapped}});
  programs.add<RmsNormBackward<S>>({{"d_h", "d_residual"}, {"d_h", "h"}});
  programs.add<RmsNormBackward<S, StreamEnds>>({{"d_h", "h"}});
  programs.add<RmsNormBackward<S, StreamJoins, GammaInEpilogue>>({{"d_h", "d_residual"}});
  programs.add<RmsNormBackward<S, StreamEnds, GammaInEpilogue>>();
  programs.add<RmsNormBackward<S, StreamJoins, GammaPlusOneInEpilogue>>({{"d_h", "d_residual"}});
  programs.add<FoldedWeightGradient<S>>();
  add_norm_derivative<S, StreamJoins, GammaFolded>(programs);
  add_norm_derivative<S, StreamEnds, GammaFolded>(programs);
  add_norm_derivative<S, StreamJoins, GammaInEpilogue>(programs);
  add_norm_derivative<S, StreamEnds, GammaInEpilogue>(programs);
  add_norm_derivative<S, StreamJoins, GammaPlusOneInEpilogue>(programs);
}

}  // namespace

void add_norm(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
