// A Llama on a GPU. What a step does is put on a stream of the model's own, and replayed as a CUDA graph from the third time on;
// the host waits for the loss and for the gradients' norm only.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/loss.h"
#include "coda/programs/norm.h"
#include "hopper/device_guard.h"
#include "hopper/embedding.h"
#include "hopper/optimizer.h"
#include "hopper/replay.h"
#include "llama/batch.h"
#include "llama/gpu.h"
#include "llama/gpu/engine.h"
#include "llama/gpu_memory.h"
#include "llama/model_impl.h"
#include "llama/packed_weight.h"

namespace coda::llama {

namespace {

using hopper::check;
using hopper::DeviceBuffer;

class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Host memory that copies to and from the device need not stop for.
template <class T>
class PinnedBuffer {
 public:
  explicit PinnedBuffer(int64_t size) {
    void* data = nullptr;
    check(cudaMallocHost(&data, static_cast<size_t>(size) * sizeof(T)), "cudaMallocHost");
    data_ = static_cast<T*>(data);
  }
  ~PinnedBuffer() { cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

void copy_to_device(const Gpu& gpu, void* to, const void* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, gpu.stream()), "cudaMemcpyAsync");
}
void copy_to_host(const Gpu& gpu, void* to, const void* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, gpu.stream()), "cudaMemcpyAsync");
}
void wait(const Gpu& gpu) {
  check(cudaStreamSynchronize(gpu.stream()), "the GPU's work");
}

/// Throws DeviceError if the device has not that many bytes left; fits says what would.
void check_device_memory(const std::string& what, double bytes, const std::string& fits = "") {
  const hopper::FreeMemory memory = hopper::free_memory();
  if (bytes <= static_cast<double>(memory.free)) return;
  throw DeviceError(fmt::format("{} take {}, but the GPU has {} free of {}{}", what, gigabytes(bytes),
                                gigabytes(static_cast<double>(memory.free)),
                                gigabytes(static_cast<double>(memory.total)), fits));
}

/// What make returns. Where the device has not the memory, the error says for what.
template <class Make>
auto allocated(const std::string& what, const Make& make) {
  try {
    return make();
  } catch (const hopper::OutOfMemory& error) {
    throw DeviceError(fmt::format("{}: {}", what, error.what()));
  }
}

/// What the device reads of a batch, in one piece so that it is one copy.
struct BatchMemory {
  explicit BatchMemory(int64_t capacity_) : capacity(capacity_), host(3 * capacity + 1), device(1, 3 * capacity + 1) {}

  void fill(const Gpu& gpu, const Batch& batch, const std::vector<int32_t>& positions, float scale) {
    std::copy(batch.tokens.begin(), batch.tokens.end(), host.data());
    std::copy(batch.targets.begin(), batch.targets.end(), host.data() + capacity);
    std::copy(positions.begin(), positions.end(), host.data() + 2 * capacity);
    std::memcpy(host.data() + 3 * capacity, &scale, sizeof scale);
    copy_to_device(gpu, device.matrix().data, host.data(), (3 * capacity + 1) * int64_t{sizeof(int32_t)});
  }
  Vector<const int32_t> tokens(int64_t m) { return column(0, m); }
  Vector<const int32_t> targets(int64_t m) { return column(1, m); }
  Vector<const int32_t> positions(int64_t m) { return column(2, m); }
  /// What the loss's sum is multiplied by before it is derived.
  Vector<const float> d_loss() { return {reinterpret_cast<const float*>(device.matrix().data + 3 * capacity), 1}; }

 private:
  Vector<const int32_t> column(int64_t i, int64_t m) { return {device.matrix().data + i * capacity, m}; }

  int64_t capacity;
  PinnedBuffer<int32_t> host;  // of a float too: its bits
  DeviceBuffer<int32_t> device;
};

/// Memory and plans of a pass: what a captured graph refers to.
struct GpuPass : Pass<Gpu, bf16> {
  GpuPass(const Gpu& gpu, const Config& config, int64_t tokens_, bool backward_)
      : Pass(config, tokens_, backward_),
        batch(tokens_),
        loss(gpu, {.tokens = tokens_, .vocab = config.vocab, .gradients = backward_}) {}

  BatchMemory batch;
  GpuLinearCrossEntropy loss;
};

class ModelOnGpu final : public Model::Impl {
 public:
  explicit ModelOnGpu(const Config& config_) : Impl(config_, Dtype::bf16), gpu_(stream_.get()) {
    const std::vector<MemoryPiece> need = gpu_model_memory(config);
    check_device_memory(fmt::format("{} parameters ({})", parameter_count(config), text_of(need)), sum(need));
    allocated("the parameters", [&] { allocate_parameters(); });
    turns_high_ = uploaded(turns.high);
    turns_low_ = uploaded(turns.low);
    reserve_workspace(hopper::kSquaresWorkspace);
  }
  ~ModelOnGpu() override { cudaStreamSynchronize(gpu_.stream()); }

  double run(const Batch& batch, std::optional<double> divisor) override;
  std::optional<std::string> find_not_finite_activation(const Batch& batch) override;
  double update(const AdamW& options) override;
  void weights_changed() override {
    const hopper::DeviceGuard current(gpu_.device());
    for (int i = 0; i < static_cast<int>(memory_.size()); ++i)
      if (parameters.is_multiplied(i))
        pack<float, float>(gpu_, memory_of(i).master.matrix(), {}, gamma_of(i), weight_of(i));
    wait(gpu_);
  }
  std::unique_ptr<Decoder::Impl> decoder() override;
  Matrix<float> on_host(int parameter, Values which) override {
    const hopper::DeviceGuard current(gpu_.device());
    wait(gpu_);
    const Matrix<float> values = to_overwrite(parameter, which);
    memory_of(parameter)[which].memory().copy_to(reinterpret_cast<std::byte*>(host_.data()));
    return values;
  }
  Matrix<float> to_overwrite(int parameter, Values /*which*/) override {
    const Parameter& p = parameters[parameter];
    host_.resize(static_cast<size_t>(p.size()));
    return {host_.data(), p.rows, p.cols};
  }
  void host_changed(int parameter, Values which) override {
    const hopper::DeviceGuard current(gpu_.device());
    wait(gpu_);
    memory_of(parameter)[which].memory().copy_from(reinterpret_cast<const std::byte*>(host_.data()));
  }

 private:
  GpuParameter<Gpu>& memory_of(int parameter) { return memory_[static_cast<size_t>(parameter)]; }
  Matrix<bf16> weight_of(int parameter) { return memory_of(parameter).weight.matrix(); }
  Vector<const float> gamma_of(int parameter) {
    const int gamma = parameters[parameter].gamma;
    return gamma < 0 ? Vector<const float>{} : Vector<const float>(memory_of(gamma).master.vector());
  }
  static DeviceBuffer<float> uploaded(const std::vector<float>& values) {
    DeviceBuffer<float> buffer(1, static_cast<int64_t>(values.size()));
    buffer.memory().copy_from(reinterpret_cast<const std::byte*>(values.data()));
    return buffer;
  }

  void allocate_parameters();
  GpuPass& pass(int64_t tokens, bool backward);
  hopper::Attention& attention(std::span<const int64_t> starts, bool backward);
  void reserve_workspace(int64_t bytes);
  Places<Gpu> places(GpuPass& p, int64_t m, hopper::Attention& attention) {
    return {.documents = &attention,
            .positions = p.batch.positions(m),
            .turns_high = turns_high_.vector(),
            .turns_low = turns_low_.vector()};
  }
  void enqueue_forward_layer(GpuPass& p, const Places<Gpu>& places, int64_t layer, int64_t m, bool keep) {
    layer_forward<Gpu, bf16>(gpu_, config, places, layer_weights_of(layer), p.stream(layer, m), p.tape(layer),
                             p.workspace, keep, p.stream(layer + 1, m));
  }
  void enqueue_pass(GpuPass& p, hopper::Attention& attention, int64_t m, bool add);
  void enqueue_update(double clip);
  LinearHead<bf16> head(GpuPass& p, int64_t m) {
    const Stream<bf16> last = p.stream(config.layers, m);
    return {.h = last.h,
            .inv_rms = last.inv_rms,
            .weight = weight_of(parameters.lm_head()),
            .label = p.batch.targets(m),
            .token_weight = {}};
  }
  LinearHeadGradients<bf16> head_gradients(GpuPass& p, int64_t m, bool add) {
    GpuParameter<Gpu>& lm_head = memory_of(parameters.lm_head());
    return {.d_h = p.d_h.top(m),
            .d_weight = config.tied ? lm_head.folded_gradient.matrix() : lm_head.gradient.matrix(),
            .add = add};
  }
  LayerWeights<bf16> layer_weights_of(int64_t layer) {
    return layer_weights<bf16>(parameters, layer, [&](int index) { return weight_of(index); });
  }
  LayerGradients layer_gradients_of(int64_t layer) {
    return layer_gradients(parameters, layer, [&](int index) { return memory_of(index).gradient.matrix(); });
  }

  OwnStream stream_;
  Gpu gpu_;
  std::vector<GpuParameter<Gpu>> memory_;
  DeviceBuffer<float> d_gamma_;  // slots of one matrix at a time
  DeviceBuffer<float> turns_high_, turns_low_;
  DeviceBuffer<std::byte> workspace_;
  std::unique_ptr<GpuPass> training_pass_, loss_pass_;
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool>, hopper::Attention> attention_;

  /// What the host reads at the end of a step, and what it writes before one.
  struct Scalars {
    LossValue loss;
    double sum_of_squares, norm;
    AdamWStep step;
  };
  PinnedBuffer<Scalars> scalars_{1};
  DeviceBuffer<Scalars> device_scalars_{1, 1};

  // Graphs refer to memory, so they go when it does.
  std::map<std::tuple<const hopper::Attention*, int64_t, bool, bool>, hopper::Replay> passes_;
  std::map<double, hopper::Replay> updates_;  // by clip

  std::vector<float> host_;
};

void ModelOnGpu::allocate_parameters() {
  int64_t gamma_slots = 0;
  for (int i = 0; i < static_cast<int>(parameters.all().size()); ++i) {
    const Parameter& p = parameters[i];
    GpuParameter<Gpu>& m = memory_.emplace_back(parameters, i);
    // All bits set is a NaN.
    for (const Values which : {Values::master, Values::gradient}) m[which].memory().fill(std::byte{0xff});
    for (const Values which : {Values::moment1, Values::moment2}) m[which].memory().fill(std::byte{0});
    if (p.gamma >= 0) gamma_slots = std::max(gamma_slots, unpack_slots(p.rows) * p.cols);
  }
  d_gamma_ = DeviceBuffer<float>(1, gamma_slots);
}

void ModelOnGpu::reserve_workspace(int64_t bytes) {
  if (bytes <= gpu_.workspace_bytes()) return;
  wait(gpu_);
  passes_.clear();
  updates_.clear();
  workspace_ = {};
  workspace_ = allocated("the workspace of products and attention", [&] { return DeviceBuffer<std::byte>(1, bytes); });
  gpu_.set_workspace(workspace_.matrix().data, bytes);
}

GpuPass& ModelOnGpu::pass(int64_t tokens, bool backward) {
  std::unique_ptr<GpuPass>& current = backward ? training_pass_ : loss_pass_;
  if (current && current->tokens >= tokens) return *current;
  wait(gpu_);
  passes_.clear();
  current.reset();
  const std::string what = fmt::format("the activations of {} tokens", tokens);
  const double bytes = gpu_pass_bytes(config, tokens, backward);
  const double share = static_cast<double>(hopper::free_memory().free) / bytes;
  check_device_memory(what, bytes,
                      fmt::format("; {} tokens would fit", static_cast<int64_t>(share * static_cast<double>(tokens))));
  current = allocated(what, [&] { return std::make_unique<GpuPass>(gpu_, config, tokens, backward); });
  reserve_workspace(std::max(
      hopper::embedding_backward_workspace(gpu_, tokens),
      current->loss.workspace(head(*current, tokens), {.reduction = Reduction::sum},
                              backward ? head_gradients(*current, tokens, true) : LinearHeadGradients<bf16>{})));
  return *current;
}

hopper::Attention& ModelOnGpu::attention(std::span<const int64_t> starts, bool backward) {
  const hopper::AttentionBatch batch = hopper::model_batch(starts);
  const auto key = std::make_tuple(batch.tokens, batch.documents, batch.length, batch.ragged, backward);
  auto found = attention_.find(key);
  if (found == attention_.end()) {
    const AttentionShape shape{.heads = config.heads, .kv_heads = config.kv_heads, .head_dim = config.head_dim};
    found = attention_.try_emplace(key, gpu_, shape, batch, backward).first;
    reserve_workspace(found->second.workspace_bytes());
  }
  if (batch.ragged) found->second.set_documents(gpu_, starts);
  return found->second;
}

void ModelOnGpu::enqueue_pass(GpuPass& p, hopper::Attention& attention, int64_t m, bool add) {
  const Places<Gpu> where = places(p, m, attention);
  const Vector<const int32_t> tokens = p.batch.tokens(m);
  LossValue* loss = &device_scalars_.matrix().data->loss;
  hopper::embedding_forward(gpu_, memory_of(Parameters::kEmbedding).master.matrix(), tokens, config.rms_eps,
                            p.stream(0, m));
  for (int64_t l = 0; l < config.layers; ++l) enqueue_forward_layer(p, where, l, m, p.backward);
  const CrossEntropyOptions options{.reduction = Reduction::sum};
  if (!p.backward) {
    p.loss.forward(gpu_, head(p, m), options, loss);
    return;
  }
  p.loss.forward_backward(gpu_, head(p, m), options, p.batch.d_loss(), head_gradients(p, m, add), loss);
  for (int64_t l = config.layers - 1; l >= 0; --l)
    layer_backward<Gpu, bf16>(gpu_, config, where, layer_weights_of(l), p.stream(l, m), p.tape(l), p.workspace,
                              p.d_h.top(m), layer_gradients_of(l), add);
  hopper::embedding_backward(gpu_, p.d_h.top(m), tokens, memory_of(Parameters::kEmbedding).gradient.matrix(), add);
}

double ModelOnGpu::run(const Batch& batch, std::optional<double> divisor) {
  check_batch(batch, config.vocab);
  const bool backward = divisor.has_value();
  if (backward && !(*divisor > 0))
    throw UsageError(fmt::format("divisor is {}; it needs to be the positive number of counted targets", *divisor));
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  if (m == 0) return 0;
  const hopper::DeviceGuard current(gpu_.device());
  GpuPass& p = pass(m, backward);
  hopper::Attention& attention = this->attention(batch.document_starts, backward);
  p.batch.fill(gpu_, batch, positions_of(batch.document_starts), static_cast<float>(1 / divisor.value_or(1)));
  const bool add = backward && gradients_started;
  const auto key = std::make_tuple(&attention, m, backward, add);
  if (backward) {
    gradients_started = true;
    if (!passes_.contains(key)) reserve_workspace(weight_gradient_workspace(config, m, gpu_.multiprocessors()));
  }
  passes_[key].run(gpu_, [&] { enqueue_pass(p, attention, m, add); });
  copy_to_host(gpu_, &scalars_.data()->loss, &device_scalars_.matrix().data->loss, sizeof(LossValue));
  wait(gpu_);
  return scalars_.data()->loss.sum;
}

void ModelOnGpu::enqueue_update(double clip) {
  Scalars* scalars = device_scalars_.matrix().data;
  const int count = static_cast<int>(memory_.size());
  check(cudaMemsetAsync(&scalars->sum_of_squares, 0, sizeof(double), gpu_.stream()), "cudaMemsetAsync");
  // From the folded gradients to those of W and gamma, and all squares.
  for (int i = 0; i < count; ++i) {
    const Parameter& p = parameters[i];
    if (p.gamma < 0) continue;
    GpuParameter<Gpu>& m = memory_of(i);
    const Matrix<float> slots{d_gamma_.matrix().data, unpack_slots(p.rows), p.cols};
    const Matrix<float> folded = (p.read_twice ? m.folded_gradient : m.gradient).matrix();
    unpack_gradient<float, float>(gpu_, folded, {}, m.master.matrix(), gamma_of(i), m.gradient.matrix(), slots,
                                  p.read_twice);
    total(gpu_, slots, memory_of(p.gamma).gradient.vector());
  }
  for (int i = 0; i < count; ++i) hopper::add_squares(gpu_, memory_of(i).gradient.matrix(), &scalars->sum_of_squares);
  hopper::clip_gradients(gpu_, &scalars->sum_of_squares, clip, &scalars->norm, &scalars->step);
  // Norm weights first: the matrices are folded with what they become.
  for (const bool matrices : {false, true}) {
    for (int i = 0; i < count; ++i) {
      if (parameters[i].decays != matrices) continue;
      GpuParameter<Gpu>& m = memory_of(i);
      hopper::adamw(gpu_,
                    {.master = m.master.matrix(),
                     .moment1 = m.moment1.matrix(),
                     .moment2 = m.moment2.matrix(),
                     .gradient = m.gradient.matrix(),
                     .gamma = gamma_of(i),
                     .weight = parameters.is_multiplied(i) ? weight_of(i) : Matrix<bf16>{},
                     .decays = matrices},
                    &scalars->step);
    }
  }
}

double ModelOnGpu::update(const AdamW& options) {
  const hopper::DeviceGuard current(gpu_.device());
  scalars_.data()->step = adamw_step(options, updates + 1);
  copy_to_device(gpu_, &device_scalars_.matrix().data->step, &scalars_.data()->step, sizeof(AdamWStep));
  updates_[options.clip].run(gpu_, [&] { enqueue_update(options.clip); });
  copy_to_host(gpu_, &scalars_.data()->norm, &device_scalars_.matrix().data->norm, sizeof(double));
  wait(gpu_);
  gradients_started = false;
  const double norm = scalars_.data()->norm;
  if (std::isfinite(norm)) ++updates;
  return norm;
}

std::optional<std::string> ModelOnGpu::find_not_finite_activation(const Batch& batch) {
  check_batch(batch, config.vocab);
  const int64_t m = static_cast<int64_t>(batch.tokens.size());
  const hopper::DeviceGuard current(gpu_.device());
  GpuPass& p = pass(m, true);
  const Places<Gpu> where = places(p, m, attention(batch.document_starts, true));
  p.batch.fill(gpu_, batch, positions_of(batch.document_starts), 1);
  std::vector<bf16> values;
  const auto fetched = [&](Matrix<bf16> matrix) {
    values.resize(static_cast<size_t>(matrix.rows * matrix.cols));
    copy_to_host(gpu_, values.data(), matrix.data, matrix.rows * matrix.cols * int64_t{sizeof(bf16)});
    wait(gpu_);
    return Matrix<bf16>{values.data(), matrix.rows, matrix.cols};
  };
  hopper::embedding_forward(gpu_, memory_of(Parameters::kEmbedding).master.matrix(), p.batch.tokens(m), config.rms_eps,
                            p.stream(0, m));
  std::optional<std::string> found = find_not_finite(kEmbeddingOfTokens, fetched(p.stream(0, m).h));
  for (int64_t l = 0; l < config.layers && !found; ++l) {
    enqueue_forward_layer(p, where, l, m, true);
    found = find_not_finite_in_layer<Gpu, bf16>(l, m, p.tape(l), p.workspace, p.stream(l + 1, m).h, fetched);
  }
  const Stream<bf16> last = p.stream(config.layers, m);
  const Matrix<const bf16> weight = weight_of(parameters.lm_head());
  DeviceBuffer<bf16> logits(1, config.vocab);
  for (int64_t i = 0; i < m && !found; ++i) {
    const Matrix<const bf16> h = last.h.row_range(i, 1);
    const RmsNorm<Tensors<bf16>> program{.inv_rms = Vector<float>{last.inv_rms.data + i, 1}, .y = logits.matrix()};
    reserve_workspace(gemm_workspace(h, weight, program));
    gemm(gpu_, h, weight, program);
    found = find_not_finite(fmt::format("the logits of token {}", i), fetched(logits.matrix()));
  }
  return found;
}

/// One token after the other has no use for a GPU's products of 128 rows: it is done by the CPU engine, with a copy of the weights.
class DecoderOnHost final : public Decoder::Impl {
 public:
  explicit DecoderOnHost(Model::Impl& source)
      : cpu_(0), model_(cpu_, source.config, source.dtype), decoder_(with_weights_of(source)) {}
  std::span<const float> feed(std::span<const int32_t> tokens) override { return decoder_.feed(tokens); }

 private:
  Model& with_weights_of(Model::Impl& source) {
    std::vector<float> value;
    for (const TensorRows& tensor : source.parameters.tensors()) {
      value.resize(static_cast<size_t>(tensor.info.size()));
      source.parameters.unpack(tensor, source.on_host(tensor.parameter, Values::master), value);
      model_.set_tensor(tensor.info.name, value);
    }
    model_.weights_changed();
    return model_;
  }

  Cpu cpu_;
  Model model_;
  Decoder decoder_;
};

std::unique_ptr<Decoder::Impl> ModelOnGpu::decoder() {
  return std::make_unique<DecoderOnHost>(*this);
}

}  // namespace

void check_gpu() {
  const Gpu gpu;
}

void check_gpu_memory(const Config& config, const GpuStep& step) {
  const hopper::FreeMemory memory = hopper::free_memory();
  if (const auto why = why_it_does_not_fit(config, step, memory.free, memory.total)) throw DeviceError(*why);
}

std::unique_ptr<Model> model_on_gpu(const Config& config) {
  llama::check(config);
  check_gpu();
  return std::make_unique<Model>(std::make_unique<ModelOnGpu>(config));
}

}  // namespace coda::llama
