#include "coda/programs/rope.h"
#include "verify/derivative.h"

namespace coda::verify {

namespace {

/// L = Σ d·qkv. dot is <d, qkv> = <dL/dacc, acc>.
template <class S>
std::vector<Row> verify_rope(uint64_t seed) {
  using Forward = RmsNormRope<S>;
  constexpr int64_t kRows = 5, kCols = 144;
  Random random(seed);
  Case<Forward> forward(kRows, kCols, random);
  forward.template map<float>();
  Case<RopeBackward<S>> backward(kRows, kCols, random);
  backward.template map<float>();
  const auto& d = backward.acc();

  const auto d_acc = gradient(forward, [&](const auto& outputs, int64_t i) {
    double slope = 0;
    for (int64_t c = 0; c < kCols; ++c) slope += d(i, c).value * outputs["qkv"].value(i, c).slope[0];
    return slope;
  });
  oracle::Grid<double> dot(2, kRows);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) dot(j / 128, i) += d_acc(i, j) * forward.acc()(i, j).value;
  return verify_derivative<Forward>(backward,
                                    {{"inv_rms", elements_of(forward, "inv_rms")},
                                     {"position", elements_of(forward, "position")},
                                     {"turns_high", elements_of(forward, "turns_high")},
                                     {"turns_low", elements_of(forward, "turns_low")},
                                     {"qkv", values(forward)["qkv"].value}},
                                    {{"d_qkv", d_acc}, {"dot", dot}});
}

template <class S>
void add(Programs& programs) {
  programs.add<RmsNormRope<S>>();
  programs.add<RopeBackward<S>>({{"d_qkv", kMapped}});
  add_derivative<RmsNormRope<S>, RopeBackward<S>>(programs, verify_rope<S>);
}

}  // namespace

void add_rope(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
