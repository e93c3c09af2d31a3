#include "bf16_path.h"

#include <algorithm>
#include <cmath>

#include "operand_shape.h"

namespace coda::bench {

namespace {

using Grid = oracle::Grid<double>;
using detail::row_slot_count;

constexpr int64_t kGroup = 128;  // columns of a slot

double bf16_of(double x) {
  return round_to_bf16(x);
}

Grid product_of(const Accumulators& acc) {
  Grid product = acc;
  std::ranges::transform(product.values, product.values.begin(), bf16_of);
  return product;
}

/// bf16(scale[row] · x).
Grid scaled(Grid x, Vector<const float> scale) {
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j) x(i, j) = bf16_of(static_cast<double>(scale[i]) * x(i, j));
  return x;
}

/// Packed order: the place of a pair's first; its partner stands 8 further on.
int64_t first_of(int64_t pair) {
  return pair / 8 * 16 + pair % 8;
}

/// Σ term(row, col) over each group of columns, [slots, rows].
template <class Term>
Grid group_sums(int64_t rows, int64_t cols, const Term& term) {
  Grid sums(row_slot_count(cols), rows);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) sums(j / kGroup, i) += term(i, j);
  return sums;
}

Grid silu_times_up(const Grid& gate_up) {
  Grid y(gate_up.rows, gate_up.cols / 2);
  for (int64_t i = 0; i < y.rows; ++i)
    for (int64_t p = 0; p < y.cols; ++p)
      y(i, p) = bf16_of(bf16_of(silu(gate_up(i, first_of(p)))) * gate_up(i, first_of(p) + 8));
  return y;
}

template <class P>
Grid residual_sum(const Accumulators& acc, const P& program) {
  Grid h = product_of(acc);
  for (int64_t i = 0; i < h.rows; ++i)
    for (int64_t j = 0; j < h.cols; ++j) h(i, j) = bf16_of(h(i, j) + static_cast<double>(program.residual(i, j)));
  return h;
}
Grid square_sums(const Grid& h) {
  return group_sums(h.rows, h.cols, [&](int64_t i, int64_t j) { return h(i, j) * h(i, j); });
}

struct LossParts {
  Grid logits, maxima, log_sum_exp, label_logit;
};
template <class P>
LossParts loss_parts(const Accumulators& acc, const P& program) {
  LossParts parts{
      .logits = scaled(product_of(acc), program.inv_rms), .maxima = {}, .log_sum_exp = {}, .label_logit = {}};
  const Grid& l = parts.logits;
  parts.maxima = Grid(row_slot_count(l.cols), l.rows);
  parts.log_sum_exp = parts.maxima;
  parts.label_logit =
      group_sums(l.rows, l.cols, [&](int64_t i, int64_t j) { return j == program.label[i] ? l(i, j) : 0.0; });
  for (int64_t i = 0; i < l.rows; ++i)
    for (int64_t slot = 0; slot < parts.maxima.rows; ++slot) {
      const int64_t begin = slot * kGroup, end = std::min(begin + kGroup, l.cols);
      double top = l(i, begin), sum = 0;
      for (int64_t j = begin; j < end; ++j) top = std::max(top, l(i, j));
      for (int64_t j = begin; j < end; ++j) sum += std::exp(l(i, j) - top);
      parts.maxima(slot, i) = top;
      parts.log_sum_exp(slot, i) = top + std::log(sum);
    }
  return parts;
}

}  // namespace

Grids bf16_path(const Accumulators& acc, const Store<HostSide>& /*program*/) {
  return {product_of(acc)};
}

Grids bf16_path(const Accumulators& acc, const AccumulateInto<HostSide>& program) {
  Grid out = product_of(acc);
  for (int64_t i = 0; i < out.rows; ++i)
    for (int64_t j = 0; j < out.cols; ++j) out(i, j) += static_cast<double>(program.out(i, j));
  return {out};
}

Grids bf16_path(const Accumulators& acc, const Residual<HostSide>& program) {
  Grid h = residual_sum(acc, program), sums = square_sums(h);
  return {std::move(h), std::move(sums)};
}

Grids bf16_path(const Accumulators& acc, const Residual<HostSide, GammaInEpilogue>& program) {
  Grid h = residual_sum(acc, program), x = h, sums = square_sums(h);
  for (int64_t i = 0; i < h.rows; ++i)
    for (int64_t j = 0; j < h.cols; ++j) x(i, j) = bf16_of(h(i, j) * static_cast<double>(program.gamma[j]));
  return {std::move(h), std::move(x), std::move(sums)};
}

Grids bf16_path(const Accumulators& acc, const RmsNormSwiGlu<HostSide, KeepGateUp>& program) {
  Grid gate_up = scaled(product_of(acc), program.inv_rms), y = silu_times_up(gate_up);
  return {std::move(gate_up), std::move(y)};
}

Grids bf16_path(const Accumulators& acc, const RmsNormSwiGlu<HostSide, DropGateUp>& program) {
  return {silu_times_up(scaled(product_of(acc), program.inv_rms))};
}

Grids bf16_path(const Accumulators& acc, const RmsNormRope<HostSide>& program) {
  Grid qkv = scaled(product_of(acc), program.inv_rms);
  for (int64_t i = 0; i < qkv.rows; ++i)
    for (int64_t p = 0; p < qkv.cols / 2; ++p) {
      const int64_t period = p % program.turns_high.size;
      double& first = qkv(i, first_of(p));
      double& second = qkv(i, first_of(p) + 8);
      const Pair<double> turned =
          rotate(Pair<double>{first, second}, rotation<double>(static_cast<double>(program.position[i]),
                                                               static_cast<double>(program.turns_high[period]),
                                                               static_cast<double>(program.turns_low[period])));
      first = bf16_of(turned.first);
      second = bf16_of(turned.second);
    }
  return {std::move(qkv)};
}

Grids bf16_path(const Accumulators& acc, const CrossEntropy<HostSide, KeepLogits>& program) {
  LossParts parts = loss_parts(acc, program);
  Grid relative = parts.logits;
  for (int64_t i = 0; i < relative.rows; ++i)
    for (int64_t j = 0; j < relative.cols; ++j) relative(i, j) = bf16_of(relative(i, j) - parts.maxima(j / kGroup, i));
  return {std::move(parts.maxima), std::move(relative), std::move(parts.log_sum_exp), std::move(parts.label_logit)};
}

Grids bf16_path(const Accumulators& acc, const CrossEntropy<HostSide, RecomputeLogits>& program) {
  LossParts parts = loss_parts(acc, program);
  return {std::move(parts.log_sum_exp), std::move(parts.label_logit)};
}

Grids bf16_path(const Accumulators& acc, const CrossEntropyBackward<HostSide, RecomputeLogits>& program) {
  const Grid logits = scaled(product_of(acc), program.inv_rms);
  Grid gradient(logits.rows, logits.cols);
  for (int64_t i = 0; i < logits.rows; ++i)
    for (int64_t j = 0; j < logits.cols; ++j) {
      double dl = std::exp(logits(i, j) - static_cast<double>(program.log_sum_exp[i])) *
                  static_cast<double>(program.d_log_sum_exp[i]);
      if (j == program.label[i]) dl += static_cast<double>(program.d_label_logit[i]);
      gradient(i, j) = bf16_of(dl);
    }
  Grid dot = group_sums(logits.rows, logits.cols, [&](int64_t i, int64_t j) { return gradient(i, j) * logits(i, j); });
  return {scaled(std::move(gradient), program.inv_rms), std::move(dot)};
}

Grids bf16_path(const Accumulators& acc, const SwiGluBackward<HostSide>& program) {
  const Grid d_y = product_of(acc);
  Grid d_gate_up(d_y.rows, 2 * d_y.cols), y(d_y.rows, d_y.cols);
  const auto gate_up = [&](int64_t i, int64_t j) { return static_cast<double>(program.gate_up(i, j)); };
  for (int64_t i = 0; i < d_y.rows; ++i)
    for (int64_t p = 0; p < d_y.cols; ++p) {
      const double gate = gate_up(i, first_of(p)), up = gate_up(i, first_of(p) + 8);
      const double gated = bf16_of(silu(gate)), d_gated = bf16_of(d_y(i, p) * up), s = sigmoid(gate);
      y(i, p) = bf16_of(gated * up);
      d_gate_up(i, first_of(p)) = bf16_of(d_gated * s * (1 + gate * (1 - s)));
      d_gate_up(i, first_of(p) + 8) = bf16_of(d_y(i, p) * gated);
    }
  Grid dot = group_sums(d_y.rows, d_y.cols, [&](int64_t i, int64_t p) {
    const int64_t j = first_of(p);
    return d_gate_up(i, j) * gate_up(i, j) + d_gate_up(i, j + 8) * gate_up(i, j + 8);
  });
  return {scaled(std::move(d_gate_up), program.inv_rms), std::move(y), std::move(dot)};
}

Grids bf16_path(const Accumulators& acc, const RmsNormBackward<HostSide>& program) {
  Grid d_h = product_of(acc);
  for (int64_t i = 0; i < d_h.rows; ++i) {
    const double r = static_cast<double>(program.inv_rms[i]), s = static_cast<double>(program.mean_dot[i]);
    for (int64_t j = 0; j < d_h.cols; ++j)
      d_h(i, j) = bf16_of(bf16_of(d_h(i, j) - r * r * s * static_cast<double>(program.h(i, j))) +
                          static_cast<double>(program.d_residual(i, j)));
  }
  return {std::move(d_h)};
}

}  // namespace coda::bench
