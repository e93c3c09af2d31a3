// A Llama as its definition reads: naive loops over one scalar type, nothing of the library's engines, folding or packing.
// On double it is the value; on Dual<double> it is the derivative along a direction in the space of weights.
#pragma once
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "coda/vjp.h"
#include "llama/config.h"

namespace reference {

template <class T>
using Tensors = std::map<std::string, std::vector<T>>;  // Hugging Face's names and layout

template <class T>
struct Rows {  // [rows][cols]
  int64_t rows, cols;
  std::vector<T> data;
  Rows(int64_t r, int64_t c) : rows(r), cols(c), data(static_cast<size_t>(r * c), T(0.0)) {}
  T& operator()(int64_t i, int64_t j) { return data[static_cast<size_t>(i * cols + j)]; }
  const T& operator()(int64_t i, int64_t j) const { return data[static_cast<size_t>(i * cols + j)]; }
};

/// x Wᵀ, W [out, in].
template <class T>
Rows<T> linear(const Rows<T>& x, const std::vector<T>& w) {
  const int64_t out = static_cast<int64_t>(w.size()) / x.cols;
  Rows<T> y(x.rows, out);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t o = 0; o < out; ++o)
      for (int64_t j = 0; j < x.cols; ++j) y(i, o) = y(i, o) + x(i, j) * w[static_cast<size_t>(o * x.cols + j)];
  return y;
}

template <class T>
Rows<T> rms_norm(const Rows<T>& h, const std::vector<T>& gamma, double eps) {
  using coda::sqrt;
  Rows<T> x = h;
  for (int64_t i = 0; i < h.rows; ++i) {
    T sum = 0.0;
    for (int64_t j = 0; j < h.cols; ++j) sum = sum + h(i, j) * h(i, j);
    const T r = T(1.0) / sqrt(sum / T(static_cast<double>(h.cols)) + T(eps));
    for (int64_t j = 0; j < h.cols; ++j) x(i, j) = h(i, j) * r * gamma[static_cast<size_t>(j)];
  }
  return x;
}

/// Radians per position of pair i of a head.
inline double frequency(const coda::llama::Config& c, int64_t i) {
  double f = std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.head_dim));
  using Kind = coda::llama::RopeScaling::Kind;
  if (c.rope.kind == Kind::linear) f /= c.rope.factor;
  if (c.rope.kind == Kind::llama3) {
    const double wave = 2 * std::numbers::pi / f, old = static_cast<double>(c.rope.original_max_position_embeddings);
    if (wave > old / c.rope.low_freq_factor) {
      f /= c.rope.factor;
    } else if (wave >= old / c.rope.high_freq_factor) {
      const double s = (old / wave - c.rope.low_freq_factor) / (c.rope.high_freq_factor - c.rope.low_freq_factor);
      f = (1 - s) * f / c.rope.factor + s * f;
    }
  }
  return f;
}

template <class T>
void rope(Rows<T>& x, const coda::llama::Config& c, const std::vector<int64_t>& positions) {
  const int64_t half = c.head_dim / 2;
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t head = 0; head < x.cols / c.head_dim; ++head)
      for (int64_t j = 0; j < half; ++j) {
        const double angle = static_cast<double>(positions[static_cast<size_t>(i)]) * frequency(c, j);
        const T cosine(std::cos(angle)), sine(std::sin(angle));
        T &a = x(i, head * c.head_dim + j), &b = x(i, head * c.head_dim + half + j);
        const T first = a * cosine - b * sine, second = b * cosine + a * sine;
        a = first;
        b = second;
      }
}

/// Sum over counted targets of the cross-entropy; documents packed one after the other.
template <class T>
T loss(const coda::llama::Config& c, const Tensors<T>& w, const std::vector<int32_t>& tokens,
       const std::vector<int32_t>& targets, const std::vector<int64_t>& starts) {
  using coda::exp;
  using coda::log;
  const int64_t m = static_cast<int64_t>(tokens.size());
  std::vector<int64_t> positions, first;
  for (size_t doc = 0; doc + 1 < starts.size(); ++doc)
    for (int64_t i = starts[doc]; i < starts[doc + 1]; ++i) {
      positions.push_back(i - starts[doc]);
      first.push_back(starts[doc]);
    }
  const auto add = [](Rows<T> a, const Rows<T>& b) {
    for (size_t i = 0; i < a.data.size(); ++i) a.data[i] = a.data[i] + b.data[i];
    return a;
  };
  Rows<T> h(m, c.hidden);
  const auto& table = w.at("model.embed_tokens.weight");
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < c.hidden; ++j)
      h(i, j) = table[static_cast<size_t>(tokens[static_cast<size_t>(i)] * c.hidden + j)];
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    const Rows<T> x = rms_norm(h, w.at(p + "input_layernorm.weight"), c.rms_eps);
    Rows<T> q = linear(x, w.at(p + "self_attn.q_proj.weight")), k = linear(x, w.at(p + "self_attn.k_proj.weight"));
    const Rows<T> v = linear(x, w.at(p + "self_attn.v_proj.weight"));
    rope(q, c, positions);
    rope(k, c, positions);
    Rows<T> a(m, c.query_width());
    const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
    for (int64_t head = 0; head < c.heads; ++head) {
      const int64_t qc = head * c.head_dim, kc = head / (c.heads / c.kv_heads) * c.head_dim;
      for (int64_t i = 0; i < m; ++i) {
        std::vector<T> weight;
        T sum = 0.0;
        for (int64_t t = first[static_cast<size_t>(i)]; t <= i; ++t) {
          T s = 0.0;
          for (int64_t j = 0; j < c.head_dim; ++j) s = s + q(i, qc + j) * k(t, kc + j);
          weight.push_back(exp(s * T(scale)));
          sum = sum + weight.back();
        }
        for (int64_t t = first[static_cast<size_t>(i)]; t <= i; ++t)
          for (int64_t j = 0; j < c.head_dim; ++j)
            a(i, qc + j) =
                a(i, qc + j) + weight[static_cast<size_t>(t - first[static_cast<size_t>(i)])] / sum * v(t, kc + j);
      }
    }
    h = add(h, linear(a, w.at(p + "self_attn.o_proj.weight")));
    const Rows<T> n = rms_norm(h, w.at(p + "post_attention_layernorm.weight"), c.rms_eps);
    Rows<T> gate = linear(n, w.at(p + "mlp.gate_proj.weight"));
    const Rows<T> up = linear(n, w.at(p + "mlp.up_proj.weight"));
    for (size_t i = 0; i < gate.data.size(); ++i)
      gate.data[i] = gate.data[i] / (T(1.0) + exp(-gate.data[i])) * up.data[i];
    h = add(h, linear(gate, w.at(p + "mlp.down_proj.weight")));
  }
  const Rows<T> logits =
      linear(rms_norm(h, w.at("model.norm.weight"), c.rms_eps), c.tied ? table : w.at("lm_head.weight"));
  T total = 0.0;
  for (int64_t i = 0; i < m; ++i) {
    const int32_t target = targets[static_cast<size_t>(i)];
    if (target < 0) continue;
    T sum = 0.0;
    for (int64_t j = 0; j < c.vocab; ++j) sum = sum + exp(logits(i, j));
    total = total + log(sum) - logits(i, target);
  }
  return total;
}

}  // namespace reference
