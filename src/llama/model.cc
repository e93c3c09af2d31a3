#include "model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "attention.h"
#include "batch.h"
#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/loss.h"
#include "coda/programs/norm.h"
#include "counted.h"
#include "cpu_parameters.h"
#include "embedding.h"
#include "layer.h"
#include "memory.h"
#include "model_impl.h"

namespace coda::llama {

namespace {

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

namespace {

template <class E>
class ModelOf final : public Model::Impl {
 public:
  ModelOf(Cpu& cpu_, const Config& config_, Dtype dtype_)
      : Impl(config_, dtype_), cpu(cpu_), memory(allocate(parameters)), weights(parameters, memory) {}

  double run(const Batch& batch, std::optional<double> divisor) override;
  std::optional<std::string> find_not_finite_activation(const Batch& batch) override;
  double update(const AdamW& options) override {
    const double norm = adamw_update<E>(cpu, parameters, memory, weights, options, updates + 1);
    gradients_started = false;
    if (std::isfinite(norm)) ++updates;
    return norm;
  }
  void weights_changed() override { weights.write_all(cpu, parameters, memory); }
  std::unique_ptr<Decoder::Impl> decoder() override;
  Matrix<float> on_host(int parameter, Values which) override { return memory_of(parameter)[which].matrix(); }
  void host_changed(int, Values) override {}

  Matrix<const float> embedding() { return memory_of(Parameters::kEmbedding).master.matrix(); }
  LayerWeights<E> weights_of(int64_t layer) const {
    return layer_weights<E>(parameters, layer, [&](int index) { return weights.matrix(index); });
  }

  Cpu& cpu;
  CpuParameters memory;
  Weights<E> weights;

 private:
  ParameterMemory<Cpu>& memory_of(int parameter) { return memory[static_cast<size_t>(parameter)]; }
  Places<Cpu> places_of(const Batch& batch, const std::vector<int32_t>& positions) const {
    return {.documents = batch.document_starts,
            .positions = view(positions),
            .turns_high = view(turns.high),
            .turns_low = view(turns.low)};
  }
  Pass<Cpu, E>& pass(int64_t tokens, bool backward) {
    std::unique_ptr<Pass<Cpu, E>>& current = backward ? training_pass_ : loss_pass_;
    if (!current || current->tokens < tokens) {
      check_memory(fmt::format("the activations of {} tokens", tokens), pass_bytes<E>(config, tokens, backward));
      current.reset();
      current = std::make_unique<Pass<Cpu, E>>(config, tokens, backward);
    }
    return *current;
  }

  std::unique_ptr<Pass<Cpu, E>> training_pass_, loss_pass_;
  LinearCrossEntropy<E> loss_;
};

template <class E>
double ModelOf<E>::run(const Batch& batch, std::optional<double> divisor) {
  check_batch(batch, config.vocab);
  const bool backward = divisor.has_value();
  if (backward && !(*divisor > 0))
    throw UsageError(fmt::format("divisor is {}; it needs to be the positive number of counted targets", *divisor));
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  Pass<Cpu, E>& p = pass(m, backward);
  const std::vector<int32_t> positions = positions_of(batch.document_starts);
  const Places<Cpu> places = places_of(batch, positions);
  const Vector<const int32_t> tokens = view(batch.tokens), targets = view(batch.targets);

  embedding_forward<E>(cpu, embedding(), tokens, config.rms_eps, p.stream(0, m));
  for (int64_t l = 0; l < config.layers; ++l)
    layer_forward<Cpu, E>(cpu, config, places, weights_of(l), p.stream(l, m), p.tape(l), p.workspace, backward,
                          p.stream(l + 1, m));
  const Stream<const E> last = p.stream(config.layers, m);
  const LinearHead<E> head{
      .h = last.h, .inv_rms = last.inv_rms, .weight = weights.matrix(parameters.lm_head()), .label = targets};
  if (!backward) return loss_.forward(cpu, head, {.reduction = Reduction::sum}).sum;

  const bool add = gradients_started;
  gradients_started = true;
  const auto gradient = [&](int index) { return memory_of(index).gradient.matrix(); };
  const Matrix<E> d_h = p.d_h.top(m);
  const Matrix<float> d_lm_head =
      config.tied ? memory_of(Parameters::kEmbedding).folded_gradient.matrix() : gradient(parameters.lm_head());
  const float one = 1;
  const double loss = loss_
                          .forward_backward(cpu, head, {.reduction = Reduction::mean, .divisor = *divisor}, {&one, 1},
                                            {.d_h = d_h, .d_weight = d_lm_head, .add = add})
                          .sum;
  for (int64_t l = config.layers - 1; l >= 0; --l)
    layer_backward<Cpu, E>(cpu, config, places, weights_of(l), p.stream(l, m), p.tape(l), p.workspace, d_h,
                           layer_gradients(parameters, l, gradient), add);
  embedding_backward<E>(cpu, d_h, tokens, gradient(Parameters::kEmbedding), add);
  return loss;
}

template <class E>
std::optional<std::string> ModelOf<E>::find_not_finite_activation(const Batch& batch) {
  check_batch(batch, config.vocab);
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  Pass<Cpu, E>& p = pass(m, true);
  const std::vector<int32_t> positions = positions_of(batch.document_starts);
  const Places<Cpu> places = places_of(batch, positions);
  embedding_forward<E>(cpu, embedding(), view(batch.tokens), config.rms_eps, p.stream(0, m));
  std::optional<std::string> found = llama::find_not_finite(kEmbeddingOfTokens, p.stream(0, m).h);
  for (int64_t l = 0; l < config.layers && !found; ++l) {
    LayerTape<Cpu, E>& tape = p.tape(l);
    layer_forward<Cpu, E>(cpu, config, places, weights_of(l), p.stream(l, m), tape, p.workspace, true,
                          p.stream(l + 1, m));
    found = find_not_finite_in_layer<Cpu, E>(l, m, tape, p.workspace, p.stream(l + 1, m).h,
                                             [](Matrix<E> values) { return values; });
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
    check_batch({tokens, ignored, starts}, config_.vocab);
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
    if (!pass_ || pass_->tokens < m) pass_ = std::make_unique<Pass<Cpu, E>>(config_, m, false);
    Pass<Cpu, E>& p = *pass_;
    Cpu& cpu = model_.cpu;
    const std::vector<int64_t> starts{0, m};
    std::vector<int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(length_));
    const Places<Cpu> places{.documents = starts,
                             .positions = view(positions),
                             .turns_high = view(model_.turns.high),
                             .turns_low = view(model_.turns.low)};
    const AttentionShape shape{.heads = config_.heads, .kv_heads = config_.kv_heads, .head_dim = config_.head_dim};
    const int64_t q = config_.query_width(), kv = config_.kv_width();

    embedding_forward<E>(cpu, model_.embedding(), view(tokens), config_.rms_eps, p.stream(0, m));
    for (int64_t l = 0; l < config_.layers; ++l) {
      const LayerWeights<E> weights = model_.weights_of(l);
      const Stream<const E> in = p.stream(l, m);
      const Matrix<E> cache = caches_[static_cast<size_t>(l)].matrix(), qkv = cache.row_range(length_, m);
      const Matrix<E> attention = p.tape(l).attention.top(m);
      qkv_forward<Cpu, E>(cpu, places, weights, in, qkv);
      if (length_ == 0) {
        attention_forward<E>(cpu, shape, starts, qkv, attention, {});
      } else {
        const Matrix<const E> seen = cache.row_range(0, length_ + m);
        attention_decode<E>(cpu, shape, qkv.row(0), seen.col_range(q, kv), seen.col_range(q + kv, kv),
                            attention.row(0));
      }
      mlp_forward<Cpu, E>(cpu, config_.rms_eps, weights, in.h, attention, p.tape(l).mlp(m, false),
                          p.workspace.scratch(m, false), p.stream(l + 1, m));
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
  std::unique_ptr<Pass<Cpu, E>> pass_;
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
Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

const Config& Model::config() const {
  return impl_->config;
}
Dtype Model::dtype() const {
  return impl_->dtype;
}

void Model::initialize(uint64_t seed) {
  for (int i = 0; i < static_cast<int>(impl_->parameters.all().size()); ++i) {
    const Matrix<float> master = impl_->to_overwrite(i, Values::master);
    impl_->parameters.initialize(i, seed, {master.data, static_cast<size_t>(master.rows * master.cols)});
    impl_->host_changed(i, Values::master);
  }
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
  const TensorRows& tensor = impl_->parameters.find(name, value.size());
  impl_->parameters.pack(tensor, value, impl_->on_host(tensor.parameter, Values::master));
  impl_->host_changed(tensor.parameter, Values::master);
}
void Model::get_tensor(const std::string& name, std::span<float> value) const {
  const TensorRows& tensor = impl_->parameters.find(name, value.size());
  impl_->parameters.unpack(tensor, impl_->on_host(tensor.parameter, Values::master), value);
}
void Model::get_gradient(const std::string& name, std::span<float> value) const {
  const TensorRows& tensor = impl_->parameters.find(name, value.size());
  impl_->parameters.unpack(tensor, impl_->on_host(tensor.parameter, Values::gradient), value);
}
void Model::weights_changed() {
  impl_->weights_changed();
}

namespace {

/// In a tensor of a checkpoint, masters or gradients.
std::optional<std::string> find_in(Model::Impl& impl, const char* what, const TensorRows& tensor, Values which) {
  std::vector<float> value(static_cast<size_t>(tensor.info.size()));
  impl.parameters.unpack(tensor, impl.on_host(tensor.parameter, which), value);
  const int64_t cols = tensor.info.shape.back();
  return llama::find_not_finite(what + tensor.info.name, Matrix<float>{value.data(), tensor.info.size() / cols, cols});
}

struct StatePart {
  const char* prefix;
  Values which;
};
constexpr StatePart kStateParts[] = {
    {"master/", Values::master}, {"moment1/", Values::moment1}, {"moment2/", Values::moment2}};

/// The values that a tensor of the optimizer's file holds.
std::pair<int, Values> find_state(const Parameters& parameters, const StateTensor& tensor) {
  for (int i = 0; i < static_cast<int>(parameters.all().size()); ++i)
    for (const StatePart& part : kStateParts)
      if (tensor.name == part.prefix + parameters[i].name) return {i, part.which};
  throw UsageError(tensor.name + " is no state of this model's optimizer");
}

}  // namespace

std::optional<std::string> Model::find_not_finite_weight() const {
  for (const TensorRows& tensor : impl_->parameters.tensors()) {
    if (auto found = find_in(*impl_, "the weight ", tensor, Values::master)) return found;
  }
  return std::nullopt;
}
std::optional<std::string> Model::find_not_finite(const Batch& batch) {
  if (auto found = find_not_finite_weight()) return found;
  return impl_->find_not_finite_activation(batch);
}
std::optional<std::string> Model::find_not_finite_gradient() const {
  // A norm's gradient is made from those of the matrices behind it.
  const std::vector<TensorRows>& all = impl_->parameters.tensors();
  for (const size_t dimensions : {2, 1}) {
    for (auto tensor = all.rbegin(); tensor != all.rend(); ++tensor) {
      if (tensor->info.shape.size() != dimensions) continue;
      if (auto found = find_in(*impl_, "the gradient of ", *tensor, Values::gradient)) return found;
    }
  }
  return std::nullopt;
}

std::vector<StateTensor> Model::optimizer_state() const {
  std::vector<StateTensor> state;
  for (const Parameter& p : impl_->parameters.all())
    for (const StatePart& part : kStateParts) state.push_back({part.prefix + p.name, p.size()});
  return state;
}
void Model::get_state(const StateTensor& tensor, std::span<float> value) const {
  const auto [parameter, which] = find_state(impl_->parameters, tensor);
  const Matrix<float> there = impl_->on_host(parameter, which);
  std::copy_n(there.data, value.size(), value.data());
}
void Model::set_state(const StateTensor& tensor, std::span<const float> value) {
  const auto [parameter, which] = find_state(impl_->parameters, tensor);
  const Matrix<float> there = impl_->to_overwrite(parameter, which);
  std::copy_n(value.data(), value.size(), there.data);
  impl_->host_changed(parameter, which);
}

Decoder::Decoder(Model& model) : impl_(model.impl_->decoder()) {}
Decoder::~Decoder() = default;
std::span<const float> Decoder::feed(std::span<const int32_t> tokens) {
  return impl_->feed(tokens);
}

}  // namespace coda::llama
