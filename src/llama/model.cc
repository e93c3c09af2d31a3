#include "model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "attention.h"
#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/loss.h"
#include "coda/programs/norm.h"
#include "embedding.h"
#include "layer.h"
#include "memory.h"
#include "not_finite.h"
#include "parameters.h"
#include "rope.h"

namespace coda::llama {

namespace {

void check_tokens(const Batch& batch, int64_t vocab) {
  const auto check_ids = [&](std::span<const int32_t> ids, const char* name, bool may_be_ignored) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool valid = (ids[i] >= 0 && ids[i] < vocab) || (may_be_ignored && ids[i] == kIgnoreIndex);
      if (!valid)
        throw OperandError(
            fmt::format("{} of row {}", name, i), fmt::format("{}", ids[i]),
            fmt::format("an id from 0 to {}{}", vocab - 1, may_be_ignored ? ", or -100 to be ignored" : ""));
    }
  };
  if (batch.targets.size() != batch.tokens.size())
    throw OperandError("targets", fmt::format("{} values", batch.targets.size()),
                       fmt::format("one for each of the {} tokens", batch.tokens.size()));
  check_ids(batch.tokens, "token", false);
  check_ids(batch.targets, "target", true);
  const auto& starts = batch.document_starts;
  if (starts.empty() || starts.front() != 0 || starts.back() != static_cast<int64_t>(batch.tokens.size()) ||
      !std::is_sorted(starts.begin(), starts.end()))
    throw OperandError("document_starts", fmt::format("{} values", starts.size()),
                       fmt::format("ascending values from 0 to the number of tokens, {}", batch.tokens.size()));
}

std::vector<int32_t> positions_of(std::span<const int64_t> document_starts) {
  std::vector<int32_t> positions;
  for (size_t document = 0; document + 1 < document_starts.size(); ++document)
    for (int64_t i = document_starts[document]; i < document_starts[document + 1]; ++i)
      positions.push_back(static_cast<int32_t>(i - document_starts[document]));
  return positions;
}

template <class T>
Vector<const T> view(std::span<const T> values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}
template <class T>
Vector<const T> view(const std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

}  // namespace

int64_t TensorInfo::size() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

struct Model::Impl {
  Impl(Cpu& cpu_, const Config& config_, Dtype dtype_)
      : cpu(cpu_), config(config_), dtype(dtype_), turns(rotary_turns(config_)), parameters(config_) {}
  virtual ~Impl() = default;

  virtual double run(const Batch& batch, std::optional<double> divisor) = 0;
  virtual std::optional<std::string> find_not_finite_activation(const Batch& batch) = 0;
  virtual double update(const AdamW& options) = 0;
  virtual void weights_changed() = 0;
  virtual std::unique_ptr<Decoder::Impl> decoder() = 0;

  /// In a tensor of a checkpoint, masters or gradients.
  std::optional<std::string> find_in(const char* what, const TensorInfo& tensor,
                                     Buffer<float> Parameter::*buffer) const {
    std::vector<float> value(static_cast<size_t>(tensor.size()));
    parameters.get(tensor.name, buffer, value);
    const int64_t cols = tensor.shape.back();
    return llama::find_not_finite(what + tensor.name, Matrix<float>{value.data(), tensor.size() / cols, cols});
  }

  Cpu& cpu;
  const Config config;
  const Dtype dtype;
  const RotaryTurns turns;
  Parameters parameters;
  int64_t updates = 0;
  bool gradients_started = false;
};

struct Decoder::Impl {
  virtual ~Impl() = default;
  virtual std::span<const float> feed(std::span<const int32_t> tokens) = 0;
};

namespace {

/// Activations of a pass over up to tokens tokens.
template <class E>
struct Pass {
  Pass(const Config& config, int64_t tokens_, bool backward_)
      : tokens(tokens_), backward(backward_), workspace(config, tokens_, backward_) {
    // Without a backward pass two streams take turns and one tape serves every layer.
    for (int64_t l = 0; l < (backward ? config.layers + 1 : 2); ++l) {
      h.emplace_back(tokens, config.hidden);
      inv_rms.emplace_back(1, tokens);
    }
    for (int64_t l = 0; l < (backward ? config.layers : 1); ++l) tapes.emplace_back(config, tokens, backward);
    if (backward) d_h = Buffer<E>(tokens, config.hidden);
  }
  /// Of the tensors that are there for every layer and token.
  static double least_bytes(const Config& config, int64_t tokens, bool backward) {
    const auto real = [](int64_t value) { return static_cast<double>(value); };
    const double values =
        2 * real(config.hidden) + real(config.qkv_width()) + real(config.query_width()) + 2 * real(config.ffn);
    return real(backward ? config.layers : 1) * values * real(tokens) * sizeof(E);
  }
  Stream<E> stream(int64_t layer, int64_t m) {
    const size_t i = backward ? static_cast<size_t>(layer) : static_cast<size_t>(layer % 2);
    return {h[i].top(m), inv_rms[i].vector(m)};
  }
  LayerTape<E>& tape(int64_t layer) { return tapes[backward ? static_cast<size_t>(layer) : 0]; }

  int64_t tokens;
  bool backward;
  std::vector<Buffer<E>> h;  // the stream in front of every layer, and behind the last
  std::vector<Buffer<float>> inv_rms;
  std::vector<LayerTape<E>> tapes;
  LayerWorkspace<E> workspace;
  LinearCrossEntropy<E> loss;
  Buffer<E> d_h;
};

template <class E>
LayerWeights<E> layer_weights(const Parameters& parameters, const Weights<E>& weights, int64_t layer) {
  return {.qkv = weights.matrix(parameters.qkv(layer)),
          .o = weights.matrix(parameters.o(layer)),
          .gate_up = weights.matrix(parameters.gate_up(layer)),
          .down = weights.matrix(parameters.down(layer))};
}

template <class E>
class ModelOf final : public Model::Impl {
 public:
  ModelOf(Cpu& cpu_, const Config& config_, Dtype dtype_) : Impl(cpu_, config_, dtype_), weights(parameters) {}

  double run(const Batch& batch, std::optional<double> divisor) override;
  std::optional<std::string> find_not_finite_activation(const Batch& batch) override;
  double update(const AdamW& options) override {
    const double norm = adamw_update<E>(cpu, parameters, weights, options, updates + 1);
    gradients_started = false;
    if (std::isfinite(norm)) ++updates;
    return norm;
  }
  void weights_changed() override { weights.write_all(cpu, parameters); }
  std::unique_ptr<Decoder::Impl> decoder() override;

  Weights<E> weights;

 private:
  Places places_of(const Batch& batch, const std::vector<int32_t>& positions) const {
    return {.document_starts = batch.document_starts,
            .positions = view(positions),
            .turns_high = view(turns.high),
            .turns_low = view(turns.low)};
  }
  Pass<E>& pass(int64_t tokens, bool backward) {
    std::unique_ptr<Pass<E>>& current = backward ? training_pass_ : loss_pass_;
    if (!current || current->tokens < tokens) {
      check_memory(fmt::format("the activations of {} tokens", tokens), Pass<E>::least_bytes(config, tokens, backward));
      current.reset();
      current = std::make_unique<Pass<E>>(config, tokens, backward);
    }
    return *current;
  }

  std::unique_ptr<Pass<E>> training_pass_, loss_pass_;
};

template <class E>
double ModelOf<E>::run(const Batch& batch, std::optional<double> divisor) {
  check_tokens(batch, config.vocab);
  const bool backward = divisor.has_value();
  if (backward && !(*divisor > 0))
    throw UsageError(fmt::format("divisor is {}; it needs to be the positive number of counted targets", *divisor));
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  Pass<E>& p = pass(m, backward);
  const std::vector<int32_t> positions = positions_of(batch.document_starts);
  const Places places = places_of(batch, positions);
  const Vector<const int32_t> tokens = view(batch.tokens), targets = view(batch.targets);

  embedding_forward<E>(cpu, parameters[Parameters::kEmbedding].master.matrix(), tokens, config.rms_eps, p.stream(0, m));
  for (int64_t l = 0; l < config.layers; ++l)
    layer_forward<E>(cpu, config, places, layer_weights(parameters, weights, l), p.stream(l, m), p.tape(l), p.workspace,
                     backward, p.stream(l + 1, m));
  const Stream<const E> last = p.stream(config.layers, m);
  const LinearHead<E> head{
      .h = last.h, .inv_rms = last.inv_rms, .weight = weights.matrix(parameters.lm_head()), .label = targets};
  if (!backward) return p.loss.forward(cpu, head, {.reduction = Reduction::sum}).sum;

  const bool add = gradients_started;
  gradients_started = true;
  const auto gradient = [&](int index) { return parameters[index].gradient.matrix(); };
  const Matrix<E> d_h = p.d_h.top(m);
  const Matrix<float> d_lm_head =
      config.tied ? parameters[Parameters::kEmbedding].folded_gradient.matrix() : gradient(parameters.lm_head());
  const float one = 1;
  const double loss = p.loss
                          .forward_backward(cpu, head, {.reduction = Reduction::mean, .divisor = *divisor}, {&one, 1},
                                            {.d_h = d_h, .d_weight = d_lm_head, .add = add})
                          .sum;
  for (int64_t l = config.layers - 1; l >= 0; --l)
    layer_backward<E>(cpu, config, places, layer_weights(parameters, weights, l), p.stream(l, m), p.tape(l),
                      p.workspace, d_h,
                      {.qkv = gradient(parameters.qkv(l)),
                       .o = gradient(parameters.o(l)),
                       .gate_up = gradient(parameters.gate_up(l)),
                       .down = gradient(parameters.down(l))},
                      add);
  embedding_backward<E>(cpu, d_h, tokens, gradient(Parameters::kEmbedding), add);
  return loss;
}

template <class E>
std::optional<std::string> ModelOf<E>::find_not_finite_activation(const Batch& batch) {
  check_tokens(batch, config.vocab);
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  Pass<E>& p = pass(m, true);
  const std::vector<int32_t> positions = positions_of(batch.document_starts);
  const Places places = places_of(batch, positions);
  embedding_forward<E>(cpu, parameters[Parameters::kEmbedding].master.matrix(), view(batch.tokens), config.rms_eps,
                       p.stream(0, m));
  std::optional<std::string> found = llama::find_not_finite("the embedding of the tokens", p.stream(0, m).h);
  for (int64_t l = 0; l < config.layers && !found; ++l) {
    LayerTape<E>& tape = p.tape(l);
    layer_forward<E>(cpu, config, places, layer_weights(parameters, weights, l), p.stream(l, m), tape, p.workspace,
                     true, p.stream(l + 1, m));
    const auto find = [&](const char* name, Matrix<E> values) {
      if (!found) found = llama::find_not_finite(fmt::format("layer {}, {}", l, name), values);
    };
    find("qkv", tape.qkv.top(m));
    find("attention", tape.attention.top(m));
    find("h_mid", tape.h_mid.top(m));
    find("gate_up", tape.gate_up.top(m));
    find("y", p.workspace.y.top(m));
    find("h", p.stream(l + 1, m).h);
  }
  const Stream<E> last = p.stream(config.layers, m);
  Buffer<float> logits(1, config.vocab);
  for (int64_t i = 0; i < m && !found; ++i) {
    gemm(cpu, last.h.row_range(i, 1), weights.matrix(parameters.lm_head()),
         RmsNorm<Tensors<float>>{.inv_rms = Vector<float>{last.inv_rms.data + i, 1}, .y = logits.matrix()});
    found = llama::find_not_finite(fmt::format("the logits of token {}", i), logits.matrix());
  }
  return found;
}

/// Keys and values of every token so far, as F4 stores them.
template <class E>
class DecoderOf final : public Decoder::Impl {
 public:
  explicit DecoderOf(ModelOf<E>& model)
      : model_(model), config_(model.config), caches_(static_cast<size_t>(config_.layers)), logits_(1, config_.vocab) {}

  std::span<const float> feed(std::span<const int32_t> tokens) override {
    const std::vector<int32_t> ignored(tokens.size(), kIgnoreIndex);
    const std::vector<int64_t> starts{0, static_cast<int64_t>(tokens.size())};
    if (tokens.empty()) throw UsageError("no tokens to continue; a context needs at least one");
    check_tokens({tokens, ignored, starts}, config_.vocab);
    if (length_ + static_cast<int64_t>(tokens.size()) > config_.max_positions)
      throw UsageError(fmt::format("a context of {} tokens; this model has {} positions",
                                   length_ + static_cast<int64_t>(tokens.size()), config_.max_positions));
    reserve(length_ + static_cast<int64_t>(tokens.size()));
    if (length_ == 0) {
      advance(tokens);
    } else {
      for (size_t i = 0; i < tokens.size(); ++i) advance(tokens.subspan(i, 1));
    }
    return logits_.span();
  }

 private:
  void reserve(int64_t tokens) {
    if (tokens <= capacity_) return;
    const int64_t grown = std::min(config_.max_positions, std::max<int64_t>({tokens, 2 * capacity_, 256}));
    for (Buffer<E>& cache : caches_) {
      Buffer<E> larger(grown, config_.qkv_width());
      for (int64_t i = 0; i < length_; ++i)
        std::copy_n(cache.matrix().row(i), config_.qkv_width(), larger.matrix().row(i));
      cache = std::move(larger);
    }
    capacity_ = grown;
  }

  /// The first tokens together, later ones one at a time.
  void advance(std::span<const int32_t> tokens) {
    const int64_t m = static_cast<int64_t>(tokens.size());
    if (!pass_ || pass_->tokens < m) pass_ = std::make_unique<Pass<E>>(config_, m, false);
    Pass<E>& p = *pass_;
    Cpu& cpu = model_.cpu;
    const std::vector<int64_t> starts{0, m};
    std::vector<int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(length_));
    const Places places{.document_starts = starts,
                        .positions = view(positions),
                        .turns_high = view(model_.turns.high),
                        .turns_low = view(model_.turns.low)};
    const AttentionShape shape{.heads = config_.heads, .kv_heads = config_.kv_heads, .head_dim = config_.head_dim};
    const int64_t q = config_.query_width(), kv = config_.kv_width();

    embedding_forward<E>(cpu, model_.parameters[Parameters::kEmbedding].master.matrix(), view(tokens), config_.rms_eps,
                         p.stream(0, m));
    for (int64_t l = 0; l < config_.layers; ++l) {
      const LayerWeights<E> weights = layer_weights(model_.parameters, model_.weights, l);
      const Stream<const E> in = p.stream(l, m);
      const Matrix<E> cache = caches_[static_cast<size_t>(l)].matrix(), qkv = cache.row_range(length_, m);
      const Matrix<E> attention = p.tape(l).attention.top(m);
      qkv_forward<E>(cpu, places, weights, in, qkv);
      if (length_ == 0) {
        attention_forward<E>(cpu, shape, starts, qkv, attention, {});
      } else {
        const Matrix<const E> seen = cache.row_range(0, length_ + m);
        attention_decode<E>(cpu, shape, qkv.row(0), seen.col_range(q, kv), seen.col_range(q + kv, kv),
                            attention.row(0));
      }
      mlp_forward<E>(cpu, config_, weights, in.h, attention, p.tape(l), p.workspace, false, p.stream(l + 1, m));
    }
    const Stream<E> last = p.stream(config_.layers, m);
    gemm(cpu, last.h.row_range(m - 1, 1), model_.weights.matrix(model_.parameters.lm_head()),
         RmsNorm<Tensors<float>>{.inv_rms = Vector<float>{last.inv_rms.data + m - 1, 1}, .y = logits_.matrix()});
    length_ += m;
  }

  ModelOf<E>& model_;
  const Config& config_;
  std::vector<Buffer<E>> caches_;  // [capacity, qkv_width]
  Buffer<float> logits_;
  std::unique_ptr<Pass<E>> pass_;
  int64_t length_ = 0, capacity_ = 0;
};

template <class E>
std::unique_ptr<Decoder::Impl> ModelOf<E>::decoder() {
  return std::make_unique<DecoderOf<E>>(*this);
}

}  // namespace

Model::Model(Cpu& cpu, const Config& config, Dtype dtype) {
  check(config);
  // Masters, gradients and two moments in float, and what the products read.
  check_memory(fmt::format("the {} parameters with their gradients and AdamW's moments", parameter_count(config)),
               static_cast<double>(parameter_count(config)) * (dtype == Dtype::fp32 ? 16 : 18));
  if (dtype == Dtype::fp32)
    impl_ = std::make_unique<ModelOf<float>>(cpu, config, dtype);
  else
    impl_ = std::make_unique<ModelOf<bf16>>(cpu, config, dtype);
}
Model::~Model() = default;

const Config& Model::config() const {
  return impl_->config;
}
Dtype Model::dtype() const {
  return impl_->dtype;
}

void Model::initialize(uint64_t seed) {
  impl_->parameters.initialize(seed);
  impl_->weights_changed();
}

double Model::loss(const Batch& batch) {
  return impl_->run(batch, std::nullopt);
}
double Model::forward_backward(const Batch& batch, double divisor) {
  return impl_->run(batch, divisor);
}
double Model::update(const AdamW& options) {
  if (!impl_->gradients_started) throw UsageError("update() without gradients; call forward_backward() first");
  return impl_->update(options);
}
int64_t Model::updates() const {
  return impl_->updates;
}
void Model::set_updates(int64_t updates) {
  impl_->updates = updates;
}

std::vector<TensorInfo> Model::tensors() const {
  std::vector<TensorInfo> infos;
  for (const TensorRows& tensor : impl_->parameters.tensors()) infos.push_back(tensor.info);
  return infos;
}
void Model::set_tensor(const std::string& name, std::span<const float> value) {
  impl_->parameters.set(name, value);
}
void Model::get_tensor(const std::string& name, std::span<float> value) const {
  impl_->parameters.get(name, &Parameter::master, value);
}
void Model::get_gradient(const std::string& name, std::span<float> value) const {
  impl_->parameters.get(name, &Parameter::gradient, value);
}
void Model::weights_changed() {
  impl_->weights_changed();
}

std::optional<std::string> Model::find_not_finite_weight() const {
  for (const TensorInfo& tensor : tensors()) {
    if (auto found = impl_->find_in("the weight ", tensor, &Parameter::master)) return found;
  }
  return std::nullopt;
}
std::optional<std::string> Model::find_not_finite(const Batch& batch) {
  if (auto found = find_not_finite_weight()) return found;
  return impl_->find_not_finite_activation(batch);
}
std::optional<std::string> Model::find_not_finite_gradient() const {
  // A norm's gradient is made from those of the matrices behind it.
  const std::vector<TensorInfo> all = tensors();
  for (const size_t dimensions : {2, 1}) {
    for (auto tensor = all.rbegin(); tensor != all.rend(); ++tensor) {
      if (tensor->shape.size() != dimensions) continue;
      if (auto found = impl_->find_in("the gradient of ", *tensor, &Parameter::gradient)) return found;
    }
  }
  return std::nullopt;
}

std::vector<StateTensor> Model::optimizer_state() {
  std::vector<StateTensor> state;
  for (Parameter& p : impl_->parameters.all()) {
    state.push_back({"master/" + p.name, p.master.span()});
    state.push_back({"moment1/" + p.name, p.moment1.span()});
    state.push_back({"moment2/" + p.name, p.moment2.span()});
  }
  return state;
}

Decoder::Decoder(Model& model) : impl_(model.impl_->decoder()) {}
Decoder::~Decoder() = default;
std::span<const float> Decoder::feed(std::span<const int32_t> tokens) {
  return impl_->feed(tokens);
}

}  // namespace coda::llama
