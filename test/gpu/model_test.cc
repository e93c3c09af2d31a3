// The Llama on a GPU against the CPU engine's in float: loss, every gradient, accumulation, documents, a few hundred steps. Needs a GPU
// of compute capability 9.0 that nothing else allocates on, and cuDNN; not part of `make test`. Prints "passed" last, or exits with 1.
//
//   gpu_model_test [--steps 200]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "coda/tensor.h"
#include "hopper/device_memory.h"
#include "llama/gpu.h"
#include "llama/model.h"
#include "packed_documents.h"

namespace coda::test {
namespace {

using namespace coda::llama;

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

/// The same weights in every model, exact in bf16.
void set_weights(const std::vector<Model*>& models, unsigned seed, float deviation) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const TensorInfo& info : models.front()->tensors()) {
    std::vector<float> value(static_cast<size_t>(info.size()));
    for (float& x : value) {
      x = info.shape.size() == 1 ? 1 + 0.3f * normal(random) : deviation * normal(random);
      x = float(coda::bf16(x));
    }
    for (Model* model : models) model->set_tensor(info.name, value);
  }
  for (Model* model : models) model->weights_changed();
}

std::vector<float> gradient(const Model& model, const TensorInfo& info) {
  std::vector<float> g(static_cast<size_t>(info.size()));
  model.get_gradient(info.name, g);
  return g;
}
std::vector<float> tensor(const Model& model, const TensorInfo& info) {
  std::vector<float> w(static_cast<size_t>(info.size()));
  model.get_tensor(info.name, w);
  return w;
}

/// |got − want| ÷ |want|, all elements together.
double error_of(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    difference += d * d;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return std::sqrt(difference / size);
}

constexpr AdamW kNoStep{.lr = 0, .weight_decay = 0, .clip = 0};

/// The GPU's rounding is that of the CPU engine in bf16, in another order: its errors may be a quarter larger.
constexpr double kMargin = 1.25;

void expect_gradients(const char* name, const Config& config, const std::vector<int64_t>& lengths) {
  Cpu cpu(0);
  Model exact(cpu, config, Dtype::fp32), rounded(cpu, config, Dtype::bf16);
  const std::unique_ptr<Model> gpu = model_on_gpu(config);
  set_weights({&exact, &rounded, gpu.get()}, 3, 1.f / std::sqrt(static_cast<float>(config.hidden)));
  // Two micro-batches of different data, the third and later replays of the same shape.
  const PackedDocuments first(config.vocab, lengths, 1), second(config.vocab, lengths, 2);
  const auto divisor = static_cast<double>(first.counted + second.counted);
  std::vector<std::vector<float>> kept;
  for (int round = 0; round < 4; ++round) {
    double worst = 0;
    std::string worst_name;
    double loss[3];
    Model* models[3] = {&exact, &rounded, gpu.get()};
    for (int i = round == 0 ? 0 : 2; i < 3; ++i) {
      loss[i] = models[i]->forward_backward(first.batch(), divisor);
      loss[i] += models[i]->forward_backward(second.batch(), divisor);
      models[i]->update(kNoStep);
    }
    const std::vector<TensorInfo> tensors = exact.tensors();
    for (size_t t = 0; t < tensors.size(); ++t) {
      const std::vector<float> got = gradient(*gpu, tensors[t]);
      if (round > 0) {
        expect(std::memcmp(got.data(), kept[t].data(), got.size() * sizeof(float)) == 0,
               std::string(name) + ": other bits in round " + std::to_string(round) + " of " + tensors[t].name);
        continue;
      }
      kept.push_back(got);
      const std::vector<float> want = gradient(exact, tensors[t]);
      const double error = error_of(got, want), allowed = kMargin * error_of(gradient(rounded, tensors[t]), want);
      expect(error <= allowed, std::string(name) + ": " + tensors[t].name + " is off by " + std::to_string(error) +
                                   ", allowed " + std::to_string(allowed));
      if (!(error / allowed <= worst)) worst = error / allowed, worst_name = tensors[t].name;
    }
    if (round > 0) continue;
    const double off = std::fabs(loss[2] / loss[0] - 1), bf16_off = std::fabs(loss[1] / loss[0] - 1);
    expect(off <= 2 * bf16_off + 1e-3,
           std::string(name) + ": loss " + std::to_string(loss[2]) + ", needs " + std::to_string(loss[0]));
    std::printf(
        "%s: loss %.5f (float %.5f, bf16 on the CPU %.5f); worst gradient %s at %.2f of %.2f times the CPU's error\n",
        name, loss[2] / divisor, loss[0] / divisor, loss[1] / divisor, worst_name.c_str(), worst * kMargin, kMargin);
    const double alone = gpu->loss(first.batch()), wanted = exact.loss(first.batch());
    expect(std::fabs(alone / wanted - 1) <= 2e-3, std::string(name) + ": loss without gradients");
  }
}

/// A model that learns a Markov chain: losses over the steps follow those of the CPU in float, and are the same bits twice.
void expect_training(int steps) {
  const Config config{.vocab = 256, .hidden = 256, .layers = 4, .heads = 4, .kv_heads = 2, .head_dim = 64, .ffn = 704};
  Cpu cpu(0);
  std::vector<std::unique_ptr<Model>> models;
  models.push_back(std::make_unique<Model>(cpu, config, Dtype::fp32));
  models.push_back(std::make_unique<Model>(cpu, config, Dtype::bf16));
  models.push_back(model_on_gpu(config));
  models.push_back(model_on_gpu(config));
  for (auto& model : models) model->initialize(7);
  std::mt19937 random(11);
  std::vector<std::vector<double>> losses(models.size());
  for (int step = 0; step < steps; ++step) {
    PackedDocuments data(config.vocab, {128, 128, 128, 128}, 1000u + static_cast<unsigned>(step));
    for (size_t i = 0; i < data.tokens.size(); ++i)
      if (i % 128 != 0) data.tokens[i] = random() % 4 == 0 ? data.tokens[i] : (data.tokens[i - 1] * 5 + 17) % 256;
    data.counted = 0;
    for (size_t i = 0; i < data.tokens.size(); ++i) {
      data.targets[i] = i % 128 == 127 ? -100 : data.tokens[i + 1];
      data.counted += data.targets[i] >= 0;
    }
    for (size_t i = 0; i < models.size(); ++i) {
      losses[i].push_back(models[i]->forward_backward(data.batch(), static_cast<double>(data.counted)) /
                          static_cast<double>(data.counted));
      models[i]->update({.lr = 1e-3});
    }
  }
  // The measure: the mean over the last half of the distance to float, relative to the loss.
  const auto distance = [&](size_t i) {
    double sum = 0;
    for (size_t step = losses[i].size() / 2; step < losses[i].size(); ++step)
      sum += std::fabs(losses[i][step] / losses[0][step] - 1);
    return sum / (static_cast<double>(losses[i].size()) / 2);
  };
  std::printf(
      "%d steps: loss from %.4f to %.4f (float %.4f, bf16 on the CPU %.4f); mean distance to float %.2e, bf16 on the "
      "CPU %.2e\n",
      steps, losses[2].front(), losses[2].back(), losses[0].back(), losses[1].back(), distance(2), distance(1));
  expect(losses[2].back() < losses[2].front() - 1, "it learned nothing");
  expect(distance(2) <= 2 * distance(1) + 1e-4, "losses do not follow those in float");
  expect(losses[2] == losses[3], "the same seed gave other losses");
  for (const TensorInfo& info : models[2]->tensors())
    expect(tensor(*models[2], info) == tensor(*models[3], info), "the same seed gave other bits in " + info.name);
}

/// Masters and moments go out and in again.
void expect_state_survives() {
  const Config config{.vocab = 264, .hidden = 128, .layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 64, .ffn = 256};
  const std::unique_ptr<Model> model = model_on_gpu(config), other = model_on_gpu(config);
  model->initialize(1);
  const PackedDocuments data(config.vocab, {64, 64}, 5);
  model->forward_backward(data.batch(), static_cast<double>(data.counted));
  model->update({});
  for (const StateTensor& state : model->optimizer_state()) {
    std::vector<float> value(static_cast<size_t>(state.size));
    model->get_state(state, value);
    other->set_state(state, value);
  }
  other->set_updates(model->updates());
  other->weights_changed();
  for (int step = 0; step < 3; ++step) {
    const double a = model->forward_backward(data.batch(), static_cast<double>(data.counted)),
                 norm_a = model->update({});
    const double b = other->forward_backward(data.batch(), static_cast<double>(data.counted)),
                 norm_b = other->update({});
    expect(a == b && norm_a == norm_b, "a restored model goes on otherwise at step " + std::to_string(step));
  }
}

void expect_out_of_memory_is_said() {
  std::string said;
  try {
    const hopper::DeviceMemory memory(int64_t{1} << 46);
  } catch (const hopper::OutOfMemory& error) {
    said = error.what();
  }
  std::printf("%s\n", said.c_str());
  for (const char* part : {"70368.744 GB of the GPU's memory: CUDA says out of memory; ", " GB are free of "})
    expect(said.find(part) != std::string::npos, "an allocation that fails says: " + said);
  // More than what is there, at every batch: refused before anything is allocated.
  const Config large{
      .vocab = 256, .hidden = 16384, .layers = 64, .heads = 128, .kv_heads = 128, .head_dim = 128, .ffn = 65536};
  const int64_t free = hopper::free_memory().free;
  said.clear();
  try {
    make_model_on_gpu(large, GpuStep{.rows = 8, .seq = 4096});
  } catch (const DeviceError& error) {
    said = error.what();
  }
  expect(said.find("alone take ") != std::string::npos && said.find('\n') == std::string::npos, "said: " + said);
  expect(hopper::free_memory().free == free, "something was allocated");
}

void expect_not_finite_is_found() {
  const Config config{.vocab = 256, .hidden = 128, .layers = 2, .heads = 2, .kv_heads = 1, .head_dim = 64, .ffn = 256};
  const std::unique_ptr<Model> model = model_on_gpu(config);
  model->initialize(1);
  std::vector<float> gamma(128, 1.f);
  gamma[3] = 3e38f;
  model->set_tensor("model.layers.1.post_attention_layernorm.weight", gamma);
  model->weights_changed();
  const PackedDocuments data(config.vocab, {64, 64}, 5);
  const double loss = model->forward_backward(data.batch(), static_cast<double>(data.counted));
  expect(!std::isfinite(loss), "the loss of an overflowing model is finite");
  // In bf16 gate_up holds what the product of its halves cannot.
  const std::string where = model->find_not_finite(data.batch()).value_or("nothing");
  expect(where.rfind("layer 1, y, row 0, ", 0) == 0, "found " + where);
  expect(!std::isfinite(model->update({})) && model->updates() == 0, "an update with a norm that is not finite counts");
}

}  // namespace
}  // namespace coda::test

int main(int argc, char** argv) {
  using namespace coda::test;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 200;
  try {
    coda::llama::Config small{
        .vocab = 1000, .hidden = 256, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 64, .ffn = 512};
    expect_gradients("two documents of 128", small, {128, 128});
    expect_gradients("documents of many lengths", small, {100, 1, 37, 120});
    expect_gradients("one document of 300", small, {300});
    small.tied = true;
    small.vocab = 1001;
    expect_gradients("tied, odd vocabulary", small, {96, 96});
    const coda::llama::Config wide{
        .vocab = 512, .hidden = 512, .layers = 1, .heads = 4, .kv_heads = 4, .head_dim = 128, .ffn = 1408};
    expect_gradients("heads of 128", wide, {256, 256});
    expect_state_survives();
    expect_not_finite_is_found();
    expect_out_of_memory_is_said();
    expect_training(steps);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf(failures == 0 ? "passed\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
