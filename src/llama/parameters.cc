#include "parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "coda/error.h"
#include "coda/interleave.h"
#include "optimizer_rows.h"

namespace coda::llama {

namespace {

constexpr int64_t kTaskElements = int64_t{1} << 16;

/// Rows of a matrix that one thread handles together.
struct RowsTask {
  int parameter;
  int64_t first, count;
};

std::vector<RowsTask> row_tasks(Parameters& parameters) {
  std::vector<RowsTask> tasks;
  for (size_t p = 0; p < parameters.all().size(); ++p) {
    const Parameter& parameter = parameters.all()[p];
    if (!parameter.decays) continue;
    const int64_t step = std::max<int64_t>(1, kTaskElements / parameter.cols);
    for (int64_t first = 0; first < parameter.rows; first += step)
      tasks.push_back({static_cast<int>(p), first, std::min(step, parameter.rows - first)});
  }
  return tasks;
}

uint64_t splitmix64(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Normal deviates by Box and Muller's method.
void fill_normal(std::span<float> out, double deviation, uint64_t seed) {
  uint64_t state = seed;
  const auto uniform = [&] { return (static_cast<double>(splitmix64(state) >> 11) + 0.5) * 0x1.0p-53; };
  for (size_t i = 0; i < out.size(); i += 2) {
    const double radius = deviation * std::sqrt(-2 * std::log(uniform())), angle = 2 * std::numbers::pi * uniform();
    out[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < out.size()) out[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
}

void fill_nan(Buffer<float>& buffer) {
  std::fill(buffer.span().begin(), buffer.span().end(), std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

Parameters::Parameters(const Config& config) : config_(config) {
  const auto add = [&](std::string name, int64_t rows, int64_t cols, bool decays, int gamma = -1) {
    Parameter p{.name = std::move(name), .rows = rows, .cols = cols, .decays = decays, .gamma = gamma};
    p.master = Buffer<float>(rows, cols);
    p.gradient = Buffer<float>(rows, cols);
    p.moment1 = Buffer<float>(rows, cols);
    p.moment2 = Buffer<float>(rows, cols);
    fill_nan(p.master);
    fill_nan(p.gradient);
    std::fill(p.moment1.span().begin(), p.moment1.span().end(), 0.f);
    std::fill(p.moment2.span().begin(), p.moment2.span().end(), 0.f);
    all_.push_back(std::move(p));
  };
  const int64_t d = config.hidden;
  add("embedding", config.vocab, d, true);
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string layer = fmt::format("layers.{}.", l);
    add(layer + "qkv", config.qkv_width(), d, true, norm_attention(l));
    add(layer + "o", d, config.query_width(), true);
    add(layer + "gate_up", 2 * config.ffn, d, true, norm_mlp(l));
    add(layer + "down", d, config.ffn, true);
    add(layer + "norm_attention", 1, d, false);
    add(layer + "norm_mlp", 1, d, false);
  }
  add("norm_final", 1, d, false);
  if (config.tied) {
    Parameter& embedding = all_[kEmbedding];
    embedding.gamma = norm_final();
    embedding.folded_gradient = Buffer<float>(config.vocab, d);
    embedding.unfolded_lookup = true;
  } else {
    add("lm_head", config.vocab, d, true, norm_final());
  }

  using Order = TensorRows::Order;
  const auto name_rows = [&](std::string name, int parameter, int64_t first, int64_t rows, Order order) {
    const Parameter& p = all_[static_cast<size_t>(parameter)];
    std::vector<int64_t> shape = p.decays ? std::vector<int64_t>{rows, p.cols} : std::vector<int64_t>{p.cols};
    tensors_.push_back({{std::move(name), std::move(shape)}, parameter, first, rows, order});
  };
  name_rows("model.embed_tokens.weight", kEmbedding, 0, config.vocab, Order::plain);
  const int64_t q = config.query_width(), kv = config.kv_width();
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    name_rows(layer + "self_attn.q_proj.weight", qkv(l), 0, q, Order::rotary);
    name_rows(layer + "self_attn.k_proj.weight", qkv(l), q, kv, Order::rotary);
    name_rows(layer + "self_attn.v_proj.weight", qkv(l), q + kv, kv, Order::plain);
    name_rows(layer + "self_attn.o_proj.weight", o(l), 0, d, Order::plain);
    name_rows(layer + "mlp.gate_proj.weight", gate_up(l), 0, config.ffn, Order::first);
    name_rows(layer + "mlp.up_proj.weight", gate_up(l), 0, config.ffn, Order::second);
    name_rows(layer + "mlp.down_proj.weight", down(l), 0, d, Order::plain);
    name_rows(layer + "input_layernorm.weight", norm_attention(l), 0, 1, Order::plain);
    name_rows(layer + "post_attention_layernorm.weight", norm_mlp(l), 0, 1, Order::plain);
  }
  name_rows("model.norm.weight", norm_final(), 0, 1, Order::plain);
  if (!config.tied) name_rows("lm_head.weight", lm_head(), 0, config.vocab, Order::plain);
}

int64_t Parameters::stored_row(const TensorRows& tensor, int64_t i) const {
  switch (tensor.order) {
    case TensorRows::Order::first:
      return packed_row(i, false);
    case TensorRows::Order::second:
      return packed_row(i, true);
    case TensorRows::Order::rotary: {
      // Half-split: row j of a head turns with row j + head_dim/2.
      const int64_t head = i / config_.head_dim, j = i % config_.head_dim, half = config_.head_dim / 2;
      return tensor.first_row + head * config_.head_dim + packed_row(j % half, j >= half);
    }
    case TensorRows::Order::plain:
      break;
  }
  return tensor.first_row + i;
}

const TensorRows& Parameters::find(const std::string& name, size_t size) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& t) { return t.info.name == name; });
  if (found == tensors_.end()) throw UsageError(name + " is not a tensor of this model");
  if (static_cast<int64_t>(size) != found->info.size())
    throw OperandError(name, fmt::format("{} elements", size), fmt::format("{}", found->info.size()));
  return *found;
}

void Parameters::set(const std::string& name, std::span<const float> value) {
  const TensorRows& tensor = find(name, value.size());
  Parameter& p = all_[static_cast<size_t>(tensor.parameter)];
  for (int64_t i = 0; i < tensor.rows; ++i)
    std::copy_n(value.data() + i * p.cols, p.cols, p.master.matrix().row(stored_row(tensor, i)));
}

void Parameters::get(const std::string& name, Buffer<float> Parameter::*buffer, std::span<float> value) const {
  const TensorRows& tensor = find(name, value.size());
  const Parameter& p = all_[static_cast<size_t>(tensor.parameter)];
  for (int64_t i = 0; i < tensor.rows; ++i)
    std::copy_n((p.*buffer).matrix().row(stored_row(tensor, i)), p.cols, value.data() + i * p.cols);
}

void Parameters::initialize(uint64_t seed) {
  constexpr double kDeviation = 0.02;  // LlamaConfig's initializer_range
  for (Parameter& p : all_) {
    if (p.decays)
      fill_normal(p.master.span(), kDeviation, splitmix64(seed));
    else
      std::fill(p.master.span().begin(), p.master.span().end(), 1.f);
  }
}

template <class E>
Weights<E>::Weights(Parameters& parameters) : copies_(parameters.all().size()), views_(parameters.all().size()) {
  for (size_t i = 0; i < copies_.size(); ++i) {
    const Parameter& p = parameters.all()[i];
    const bool looked_up_only = i == Parameters::kEmbedding && !p.unfolded_lookup;
    if (!p.decays || looked_up_only) continue;
    if constexpr (std::is_same_v<E, float>) {
      if (p.gamma < 0) {
        views_[i] = p.master.matrix();
        continue;
      }
    }
    copies_[i] = Buffer<E>(p.rows, p.cols);
    views_[i] = copies_[i].matrix();
  }
}

template <class E>
void Weights<E>::write_rows(Parameters& parameters, int parameter, int64_t first, int64_t count) {
  Buffer<E>& copy = copies_[static_cast<size_t>(parameter)];
  if (copy.rows() == 0) return;
  const Parameter& p = parameters[parameter];
  const float* gamma = p.gamma < 0 ? nullptr : parameters[p.gamma].master.matrix().data;
  const OptimizerRows rows = optimizer_rows();
  for (int64_t i = first; i < first + count; ++i) {
    if constexpr (std::is_same_v<E, float>)
      rows.fold_float(p.master.matrix().row(i), gamma, copy.matrix().row(i), p.cols);
    else
      rows.fold_bf16(p.master.matrix().row(i), gamma, copy.matrix().row(i), p.cols);
  }
}

template <class E>
void Weights<E>::write_all(Cpu& cpu, Parameters& parameters) {
  const std::vector<RowsTask> tasks = row_tasks(parameters);
  cpu.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
    const RowsTask& task = tasks[static_cast<size_t>(i)];
    write_rows(parameters, task.parameter, task.first, task.count);
  });
}

template <class E>
double adamw_update(Cpu& cpu, Parameters& parameters, Weights<E>& weights, const AdamW& options, int64_t t) {
  const OptimizerRows rows = optimizer_rows();
  const std::vector<RowsTask> tasks = row_tasks(parameters);
  const auto for_tasks = [&](auto&& body) {
    cpu.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
      const RowsTask& task = tasks[static_cast<size_t>(i)];
      body(static_cast<size_t>(i), task, parameters[task.parameter]);
    });
  };

  // From the folded gradients to those of W and gamma, and all squares. A task's part of d_gamma is its own, and the parts
  // are added in order: the same bits for any number of threads.
  std::vector<std::vector<float>> d_gamma(tasks.size());
  std::vector<double> squares(tasks.size());
  for_tasks([&](size_t index, const RowsTask& task, Parameter& p) {
    if (p.gamma >= 0) {
      const bool tied = p.unfolded_lookup;
      d_gamma[index].assign(static_cast<size_t>(p.cols), 0.f);
      for (int64_t i = task.first; i < task.first + task.count; ++i)
        rows.unfold((tied ? p.folded_gradient : p.gradient).matrix().row(i), p.master.matrix().row(i),
                    parameters[p.gamma].master.matrix().data, tied, p.gradient.matrix().row(i), d_gamma[index].data(),
                    p.cols);
    }
    squares[index] = rows.squares(p.gradient.matrix().row(task.first), task.count * p.cols);
  });
  double sum = 0;
  for (Parameter& p : parameters.all())
    if (!p.decays) std::fill(p.gradient.span().begin(), p.gradient.span().end(), 0.f);
  for (size_t i = 0; i < tasks.size(); ++i) {
    sum += squares[i];
    const int gamma = parameters[tasks[i].parameter].gamma;
    if (gamma < 0) continue;
    const std::span<float> total = parameters[gamma].gradient.span();
    for (size_t j = 0; j < total.size(); ++j) total[j] += d_gamma[i][j];
  }
  for (Parameter& p : parameters.all())
    if (!p.decays) sum += rows.squares(p.gradient.matrix().data, p.cols);
  const double norm = std::sqrt(sum);
  if (!std::isfinite(norm)) return norm;

  const double scale = options.clip > 0 ? std::min(1.0, options.clip / (norm + 1e-6)) : 1.0;
  AdamWStep step{
      .gradient_scale = static_cast<float>(scale),
      .decay = 1,
      .beta1 = static_cast<float>(options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .step_size = static_cast<float>(options.lr / (1 - std::pow(options.beta1, static_cast<double>(t)))),
      .inv_sqrt_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, static_cast<double>(t)))),
      .eps = static_cast<float>(options.eps)};
  // Norm weights first: the matrices are folded with what they become.
  for (Parameter& p : parameters.all())
    if (!p.decays)
      rows.adamw(p.master.matrix().data, p.moment1.matrix().data, p.moment2.matrix().data, p.gradient.matrix().data,
                 p.cols, step);
  step.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  for_tasks([&](size_t, const RowsTask& task, Parameter& p) {
    const int64_t offset = task.first * p.cols;
    rows.adamw(p.master.matrix().data + offset, p.moment1.matrix().data + offset, p.moment2.matrix().data + offset,
               p.gradient.matrix().data + offset, task.count * p.cols, step);
    weights.write_rows(parameters, task.parameter, task.first, task.count);
  });
  return norm;
}

template class Weights<float>;
template class Weights<bf16>;
template double adamw_update(Cpu&, Parameters&, Weights<float>&, const AdamW&, int64_t);
template double adamw_update(Cpu&, Parameters&, Weights<bf16>&, const AdamW&, int64_t);

}  // namespace coda::llama
