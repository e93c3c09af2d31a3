#include "counted.h"

#include <initializer_list>

#include "layer_rows.h"
#include "model_impl.h"

namespace coda::llama {

namespace {

double sum(std::initializer_list<double> all) {
  double bytes = 0;
  for (const double one : all) bytes += one;
  return bytes;
}

template <class E>
double bytes_of(const LayerTape<Counted, E>& t) {
  return sum({t.qkv.bytes(), t.attention.bytes(), t.log_sum_exp.bytes(), t.h_mid.bytes(), t.inv_rms_mid.bytes(),
              t.gate_up.bytes()});
}
template <class E>
double bytes_of(const LayerWorkspace<Counted, E>& w) {
  return sum({w.partial.bytes(), w.mean_dot.bytes(), w.y.bytes(), w.d_gate_up.bytes(), w.d_h_mid.bytes(),
              w.d_attention.bytes(), w.d_qkv.bytes()});
}

}  // namespace

template <class E>
double pass_bytes(const Config& config, int64_t tokens, bool backward) {
  const Pass<Counted, E> pass(config, tokens, backward);
  double bytes = pass.d_h.bytes();
  for (const auto& h : pass.h) bytes += h.bytes();
  for (const auto& inv_rms : pass.inv_rms) bytes += inv_rms.bytes();
  for (const LayerTape<Counted, E>& tape : pass.tapes) bytes += bytes_of(tape);
  return bytes + bytes_of(pass.workspace);
}
template double pass_bytes<float>(const Config&, int64_t, bool);
template double pass_bytes<bf16>(const Config&, int64_t, bool);

}  // namespace coda::llama
