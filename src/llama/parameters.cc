#include "parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <thread>

#include "coda/error.h"
#include "coda/interleave.h"

namespace coda::llama {

namespace {

constexpr uint64_t kSplitMix = 0x9e3779b97f4a7c15u;
uint64_t splitmix64(uint64_t& state) {
  uint64_t z = state += kSplitMix;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Normal deviates by Box and Muller's method. A pair of them depends on the seed and its index alone.
void fill_normal(std::span<float> out, double deviation, uint64_t seed) {
  const auto fill = [=](size_t begin, size_t end) {
    uint64_t state = seed + begin * kSplitMix;
    const auto uniform = [&] { return (static_cast<double>(splitmix64(state) >> 11) + 0.5) * 0x1.0p-53; };
    for (size_t i = begin; i < end; i += 2) {
      const double radius = deviation * std::sqrt(-2 * std::log(uniform())), angle = 2 * std::numbers::pi * uniform();
      out[i] = static_cast<float>(radius * std::cos(angle));
      if (i + 1 < end) out[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
  };
  // A large model's take half a minute on one thread.
  constexpr size_t kRun = size_t{1} << 22;
  const size_t runs = (out.size() + kRun - 1) / kRun;
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t run = next++; run < runs; run = next++) fill(run * kRun, std::min(out.size(), (run + 1) * kRun));
  };
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < std::min<size_t>(runs, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  work();
}

}  // namespace

Parameters::Parameters(const Config& config) : config_(config) {
  const auto add = [&](std::string name, int64_t rows, int64_t cols, bool decays, int gamma = -1) {
    all_.push_back({.name = std::move(name), .rows = rows, .cols = cols, .decays = decays, .gamma = gamma});
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
    embedding.read_twice = true;
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

void Parameters::pack(const TensorRows& tensor, std::span<const float> value, Matrix<float> parameter) const {
  for (int64_t i = 0; i < tensor.rows; ++i)
    std::copy_n(value.data() + i * parameter.cols, parameter.cols, parameter.row(stored_row(tensor, i)));
}

void Parameters::unpack(const TensorRows& tensor, Matrix<const float> parameter, std::span<float> value) const {
  for (int64_t i = 0; i < tensor.rows; ++i)
    std::copy_n(parameter.row(stored_row(tensor, i)), parameter.cols, value.data() + i * parameter.cols);
}

void Parameters::initialize(int index, uint64_t seed, std::span<float> master) const {
  constexpr double kDeviation = 0.02;  // LlamaConfig's initializer_range
  if (!(*this)[index].decays) {
    std::fill(master.begin(), master.end(), 1.f);
    return;
  }
  // The seed of a matrix is the next of one sequence.
  for (int i = 0; i < index; ++i)
    if ((*this)[i].decays) splitmix64(seed);
  fill_normal(master, kDeviation, splitmix64(seed));
}

AdamWStep adamw_step(const AdamW& options, int64_t t) {
  return {.gradient_scale = 1,
          .decay = static_cast<float>(1 - options.lr * options.weight_decay),
          .beta1 = static_cast<float>(options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .step_size = static_cast<float>(options.lr / (1 - std::pow(options.beta1, static_cast<double>(t)))),
          .inv_sqrt_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, static_cast<double>(t)))),
          .eps = static_cast<float>(options.eps)};
}

}  // namespace coda::llama
