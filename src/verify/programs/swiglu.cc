#include "coda/programs/swiglu.h"
#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// L = Σ d_y·y. dot_z is <dL/dz, z> = <dL/dacc, acc>: a row scale does not change it.
template <class S>
std::vector<Row> verify_swiglu(uint64_t seed) {
  using Forward = RmsNormSwiGlu<S>;
  constexpr int64_t kRows = 5, kHidden = 136;
  Random random(seed);
  Case<Forward> forward(kRows, 2 * kHidden, random);
  forward.template map<float>();
  Case<SwiGluBackward<S>> backward(kRows, kHidden, random);
  backward.template map<float>();
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

template <class S>
void add(Programs& programs) {
  programs.add<RmsNormSwiGlu<S>>();
  programs.add<RmsNormSwiGlu<S, DropGateUp>>();
  programs.add<SwiGluBackward<S>>({{"d_gate_up", "gate_up"}});
  add_derivative<RmsNormSwiGlu<S>, SwiGluBackward<S>>(programs, verify_swiglu<S>);
}

}  // namespace

void add_swiglu(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
