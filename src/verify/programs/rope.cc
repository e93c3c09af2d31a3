#include "coda/programs/rope.h"
#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// L = Σ d·qkv. dot is <dL/dacc, acc>: without a bias, <d, qkv>.
template <class S, class Bias>
std::vector<Row> verify_rope(uint64_t seed) {
  using Forward = RmsNormRope<S, Bias>;
  constexpr int64_t kRows = 5, kCols = 144;
  Random random(seed);
  Case<Forward> forward(kRows, kCols, random);
  forward.template map<float>();
  Case<RopeBackward<S, Bias>> backward(kRows, kCols, random);
  backward.template map<float>();
  const auto& d = backward.acc();

  const auto d_acc = gradient(forward, [&](const auto& outputs, int64_t i) {
    double slope = 0;
    for (int64_t c = 0; c < kCols; ++c) slope += d(i, c).value * outputs["qkv"].value(i, c).slope[0];
    return slope;
  });
  Exact operands{{"inv_rms", elements_of(forward, "inv_rms")},
                 {"position", elements_of(forward, "position")},
                 {"turns_high", elements_of(forward, "turns_high")},
                 {"turns_low", elements_of(forward, "turns_low")},
                 {"qkv", values(forward)["qkv"].value}};
  const oracle::Grid<double> inv_rms = operands["inv_rms"];
  oracle::Grid<double> dot(2, kRows), d_bias(1, kCols);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) {
      dot(j / 128, i) += d_acc(i, j) * forward.acc()(i, j).value;
      d_bias(0, j) += d_acc(i, j) / inv_rms(0, i);
    }
  Exact want{{"d_qkv", d_acc}, {"dot", dot}};
  if constexpr (Bias::value) operands["bias"] = elements_of(forward, "bias"), want["d_bias"] = d_bias;
  return verify_derivative<Forward>(backward, operands, want);
}

template <class S, class Bias>
void add_with(Programs& programs) {
  programs.add<RmsNormRope<S, Bias>>();
  programs.add<RopeBackward<S, Bias>>({{"d_qkv", kMapped}});
  add_derivative<RmsNormRope<S, Bias>, RopeBackward<S, Bias>>(programs, verify_rope<S, Bias>);
}

template <class S>
void add(Programs& programs) {
  add_with<S, WithoutBias>(programs);
  add_with<S, WithBias>(programs);
}

}  // namespace

void add_rope(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
