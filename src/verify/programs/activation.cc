#include "coda/programs/activation.h"
#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// L = Σ d_y·y. dot_z is <dL/dacc, acc>: neither the bias nor a row scale changes it.
template <class S, class Function, class Norm, class Bias>
std::vector<Row> verify_activated(uint64_t seed) {
  using Forward = Activated<S, Function, Norm, Bias>;
  constexpr int64_t kRows = 70, kCols = 136;
  Random random(seed);
  Case<Forward> forward(kRows, kCols, random);
  forward.template map<float>();
  Case<ActivatedBackward<S, Function, Norm, Bias>> backward(kRows, kCols, random);
  backward.template map<float>();
  backward.program().f = forward.program().f;
  const auto& d_y = backward.acc();

  const auto d_acc = gradient(forward, [&](const auto& outputs, int64_t i) {
    double slope = 0;
    for (int64_t c = 0; c < kCols; ++c) slope += d_y(i, c).value * outputs["y"].value(i, c).slope[0];
    return slope;
  });
  const auto made = values(forward);
  Exact operands{{"z", made["z"].value}}, want{{"d_z", d_acc}, {"y", made["y"].value}};
  oracle::Grid<double> inv_rms(1, kRows), dot(2, kRows), d_bias(2, kCols);
  std::ranges::fill(inv_rms.values, 1.0);
  if constexpr (Norm::value) operands["inv_rms"] = inv_rms = elements_of(forward, "inv_rms");
  if constexpr (Bias::value) operands["bias"] = elements_of(forward, "bias");
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) {
      dot(j / 128, i) += d_acc(i, j) * forward.acc()(i, j).value;
      d_bias(i / 64, j) += d_acc(i, j) / inv_rms(0, i);
    }
  if constexpr (Norm::value) want["dot_z"] = dot;
  if constexpr (Bias::value) want["d_bias"] = d_bias;
  return verify_derivative<Forward>(backward, operands, want);
}

template <class S, class Function, class Norm, class Bias>
void add_function(Programs& programs) {
  using Backward = ActivatedBackward<S, Function, Norm, Bias>;
  programs.add<Backward>({{"d_z", "z"}});
  add_derivative<Activated<S, Function, Norm, Bias>, Backward>(programs, verify_activated<S, Function, Norm, Bias>);
}

template <class S>
void add(Programs& programs) {
  programs.add<Activated<S, SquaredRelu>>();
  programs.add<Activated<S, GeluErf, NoNormInFront, WithBias>>();
  programs.add<Activated<S, GeluTanh, NormInFront, WithBias>>();
  programs.add<Activated<S, GeluTanh, NormInFront, WithBias, DropInput>>();
  add_function<S, SquaredRelu, NormInFront, WithoutBias>(programs);
  add_function<S, GeluErf, NoNormInFront, WithBias>(programs);
  add_function<S, GeluTanh, NormInFront, WithBias>(programs);
}

}  // namespace

void add_activation(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
