#include "coda/programs/swiglu.h"
#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// L = Σ d_y·y. dot_z is <dL/dz, z> = <dL/dacc, acc>: a row scale does not change it.
template <class S, class Function>
std::vector<Row> verify_glu(uint64_t seed) {
  using Forward = RmsNormGlu<S, Function>;
  constexpr int64_t kRows = 5, kHidden = 136;
  Random random(seed);
  Case<Forward> forward(kRows, 2 * kHidden, random);
  forward.template map<float>();
  Case<GluBackward<S, Function>> backward(kRows, kHidden, random);
  backward.template map<float>();
  backward.program().f = forward.program().f;
  const auto& d_y = backward.acc();

  const auto d_acc = gradient(forward, [&](const auto& outputs, int64_t i) {
    double slope = 0;
    for (int64_t f = 0; f < kHidden; ++f) slope += d_y(i, f).value * outputs["y"].value(i, f).slope[0];
    return slope;
  });
  oracle::Grid<double> dot(2, kRows);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < 2 * kHidden; ++j) dot(j / 256, i) += d_acc(i, j) * forward.acc()(i, j).value;
  const auto z = values(forward);
  return verify_derivative<Forward>(backward,
                                    {{"inv_rms", elements_of(forward, "inv_rms")}, {"gate_up", z["gate_up"].value}},
                                    {{"d_gate_up", d_acc}, {"y", z["y"].value}, {"dot_z", dot}});
}

template <class S, class Function>
void add_function(Programs& programs) {
  programs.add<RmsNormGlu<S, Function>>();
  programs.add<RmsNormGlu<S, Function, DropGateUp>>();
  programs.add<GluBackward<S, Function>>({{"d_gate_up", "gate_up"}});
  add_derivative<RmsNormGlu<S, Function>, GluBackward<S, Function>>(programs, verify_glu<S, Function>);
}

template <class S>
void add(Programs& programs) {
  add_function<S, Swiglu>(programs);
  add_function<S, GegluErf>(programs);
  add_function<S, GegluTanh>(programs);
  add_function<S, SwigluClamped>(programs);
}

}  // namespace

void add_glu(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
