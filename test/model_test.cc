// The model against its definition in double precision: the loss, every gradient (along random directions, by dual numbers),
// one AdamW step, accumulation, packed documents, threads, generation.
#include "llama/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "coda/error.h"
#include "llama_reference.h"
#include "packed_documents.h"

namespace {

using coda::Cpu;
using coda::Dual;
using namespace coda::llama;
using Doubles = reference::Tensors<double>;

Config small_config() {
  Config c;
  c.vocab = 40;
  c.hidden = 32;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 16;
  c.ffn = 24;
  c.rms_eps = 1e-5;
  return c;
}

/// Three documents, where nothing else is asked for.
struct Data : coda::test::PackedDocuments {
  explicit Data(int64_t vocab, const std::vector<int64_t>& lengths = {7, 1, 11}, unsigned seed = 1)
      : PackedDocuments(vocab, lengths, seed) {}
};

/// Weights large enough that every term of a gradient matters, the same in the model and in double.
Doubles set_random_weights(Model& model, unsigned seed = 3) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Doubles weights;
  for (const TensorInfo& info : model.tensors()) {
    std::vector<float> value(static_cast<size_t>(info.size()));
    for (float& x : value) {
      x = info.shape.size() == 1 ? 1 + 0.3f * normal(random) : 0.3f * normal(random);
      if (model.dtype() == Dtype::bf16) x = float(coda::bf16(x));
    }
    model.set_tensor(info.name, value);
    weights[info.name].assign(value.begin(), value.end());
  }
  model.weights_changed();
  return weights;
}

/// d/de loss(weights + e·direction), where direction is along one tensor.
double slope(const Config& c, const Doubles& weights, const std::string& name, const std::vector<double>& direction,
             const Data& data) {
  reference::Tensors<Dual<double>> duals;
  for (const auto& [key, value] : weights) duals[key].assign(value.begin(), value.end());
  for (size_t i = 0; i < direction.size(); ++i) duals[name][i].slope[0] = direction[i];
  return reference::loss(c, duals, data.tokens, data.targets, data.starts).slope[0];
}

std::vector<float> gradient(const Model& model, const TensorInfo& info) {
  std::vector<float> g(static_cast<size_t>(info.size()));
  model.get_gradient(info.name, g);
  return g;
}

constexpr AdamW kNoStep{.lr = 0, .weight_decay = 0, .clip = 0};

void expect_loss_and_gradients(const Config& c, double loss_tolerance, double gradient_tolerance, Dtype dtype) {
  Cpu cpu(2);
  Model model(cpu, c, dtype);
  const Doubles weights = set_random_weights(model);
  const Data data(c.vocab);
  const double divisor = static_cast<double>(data.counted);
  const double loss = model.forward_backward(data.batch(), divisor);
  const double want = reference::loss(c, weights, data.tokens, data.targets, data.starts);
  EXPECT_NEAR(loss, want, loss_tolerance * want);
  EXPECT_NEAR(model.loss(data.batch()), want, loss_tolerance * want);

  const double norm = model.update(kNoStep);
  double squares = 0;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (const TensorInfo& info : model.tensors()) {
    const std::vector<float> g = gradient(model, info);
    double length = 0;
    for (float x : g) length += static_cast<double>(x) * static_cast<double>(x);
    squares += length;
    for (int trial = 0; trial < 3; ++trial) {
      // The last direction is the gradient's own: along it every element counts.
      std::vector<double> direction(g.size());
      double along = 0, size = 0;
      for (size_t i = 0; i < g.size(); ++i) {
        direction[i] = trial == 2 ? static_cast<double>(g[i]) : normal(random);
        along += direction[i] * static_cast<double>(g[i]);
        size += direction[i] * direction[i];
      }
      const double expected = slope(c, weights, info.name, direction, data) / divisor;
      EXPECT_NEAR(along, expected, gradient_tolerance * std::sqrt(length * size)) << info.name << " trial " << trial;
    }
  }
  EXPECT_NEAR(norm, std::sqrt(squares), 1e-6 * norm);
}

/// Masters and moments.
void append_state(std::vector<float>& values, const Model& model) {
  for (const StateTensor& tensor : model.optimizer_state()) {
    std::vector<float> value(static_cast<size_t>(tensor.size));
    model.get_state(tensor, value);
    values.insert(values.end(), value.begin(), value.end());
  }
}

TEST(Model, LossAndGradientsAreThoseOfTheDefinition) {
  expect_loss_and_gradients(small_config(), 2e-6, 3e-6, Dtype::fp32);
}
TEST(Model, TiedEmbeddingsAreOneParameter) {
  Config c = small_config();
  c.tied = true;
  expect_loss_and_gradients(c, 2e-6, 3e-6, Dtype::fp32);
}
TEST(Model, HeadsWiderThanTheModel) {
  Config c = small_config();
  c.head_dim = 48;
  c.kv_heads = 4;
  expect_loss_and_gradients(c, 2e-6, 3e-6, Dtype::fp32);
}
TEST(Model, StretchedRotaryFrequencies) {
  Config c = small_config();
  c.rope_theta = 100;
  c.rope = {.kind = RopeScaling::Kind::linear, .factor = 4};
  expect_loss_and_gradients(c, 2e-6, 3e-6, Dtype::fp32);
  c.rope = {.kind = RopeScaling::Kind::llama3, .factor = 8, .original_max_position_embeddings = 64};
  expect_loss_and_gradients(c, 2e-6, 3e-6, Dtype::fp32);
}
TEST(Model, Bf16IsNearTheDefinition) {
  // Each stored activation is rounded to 8 bits: relative noise of a few 2^-9 over the layers.
  expect_loss_and_gradients(small_config(), 1e-2, 4e-2, Dtype::bf16);
}

TEST(Model, MicroBatchesAddUpToOneBatch) {
  Cpu cpu(2);
  const Config c = small_config();
  const Data data(c.vocab), first(c.vocab, {7, 1});
  ASSERT_TRUE(std::equal(first.tokens.begin(), first.tokens.end(), data.tokens.begin()));
  const std::vector<int32_t> tokens(data.tokens.begin() + 8, data.tokens.end()),
      targets(data.targets.begin() + 8, data.targets.end());
  const std::vector<int64_t> starts{0, 11};

  Model whole(cpu, c, Dtype::fp32), parts(cpu, c, Dtype::fp32);
  set_random_weights(whole);
  set_random_weights(parts);
  const double divisor = static_cast<double>(data.counted);
  const double loss = whole.forward_backward(data.batch(), divisor);
  double sum = parts.forward_backward(first.batch(), divisor);
  sum += parts.forward_backward({tokens, targets, starts}, divisor);
  EXPECT_NEAR(sum, loss, 1e-6 * loss);
  whole.update(kNoStep);
  parts.update(kNoStep);
  for (const TensorInfo& info : whole.tensors()) {
    const std::vector<float> want = gradient(whole, info), got = gradient(parts, info);
    double scale = 0;
    for (float x : want) scale = std::max(scale, std::fabs(static_cast<double>(x)));
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(got[i], want[i], 2e-6 * scale) << info.name << " element " << i;
  }
  // The next accumulation starts anew.
  EXPECT_EQ(whole.forward_backward(data.batch(), divisor), loss);
}

TEST(Model, AllTargetsIgnoredGivesZeroGradients) {
  Cpu cpu(2);
  const Config c = small_config();
  Data data(c.vocab);
  std::fill(data.targets.begin(), data.targets.end(), -100);
  Model model(cpu, c, Dtype::fp32);
  set_random_weights(model);
  EXPECT_EQ(model.forward_backward(data.batch(), 1), 0);
  EXPECT_EQ(model.update(kNoStep), 0);
}

TEST(Model, TheSameBitsForAnyNumberOfThreads) {
  const Config c = small_config();
  const Data data(c.vocab, {70, 33});
  std::vector<float> first;
  for (int threads : {1, 2, 3, 5}) {
    Cpu cpu(threads);
    Model model(cpu, c, Dtype::fp32);
    model.initialize(7);
    std::vector<float> bits;
    for (int step = 0; step < 3; ++step) {
      bits.push_back(static_cast<float>(model.forward_backward(data.batch(), 100)));
      bits.push_back(static_cast<float>(model.update({})));
    }
    append_state(bits, model);
    if (first.empty()) first = bits;
    ASSERT_EQ(bits.size(), first.size());
    for (size_t i = 0; i < bits.size(); ++i) ASSERT_EQ(bits[i], first[i]) << threads << " threads, value " << i;
  }
}

/// AdamW as hf_llama's PyTorch does it, in double.
TEST(Model, UpdateIsAdamW) {
  Cpu cpu(2);
  const Config c = small_config();
  Model model(cpu, c, Dtype::fp32);
  const Doubles before = set_random_weights(model);
  const Data data(c.vocab);
  const AdamW options{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0.3, .clip = 0.5};
  Doubles p = before, m, v;
  for (int t = 1; t <= 3; ++t) {
    model.forward_backward(data.batch(), static_cast<double>(data.counted));
    const double norm = model.update(options);
    EXPECT_EQ(model.updates(), t);
    ASSERT_GT(norm, options.clip);
    for (const TensorInfo& info : model.tensors()) {
      const std::vector<float> g = gradient(model, info);
      auto &pw = p[info.name], &mw = m[info.name], &vw = v[info.name];
      mw.resize(g.size());
      vw.resize(g.size());
      std::vector<float> got(g.size());
      model.get_tensor(info.name, got);
      for (size_t i = 0; i < g.size(); ++i) {
        const double clipped = static_cast<double>(g[i]) * options.clip / (norm + 1e-6);
        if (info.shape.size() > 1) pw[i] *= 1 - options.lr * options.weight_decay;
        mw[i] = options.beta1 * mw[i] + (1 - options.beta1) * clipped;
        vw[i] = options.beta2 * vw[i] + (1 - options.beta2) * clipped * clipped;
        pw[i] -= options.lr / (1 - std::pow(options.beta1, t)) * mw[i] /
                 (std::sqrt(vw[i]) / std::sqrt(1 - std::pow(options.beta2, t)) + options.eps);
        ASSERT_NEAR(got[i], pw[i], 2e-7 * (1 + std::fabs(pw[i])) * t) << info.name << " element " << i;
      }
    }
  }
}

TEST(Model, NothingChangesWhenTheNormIsNotFinite) {
  Cpu cpu(1);
  const Config c = small_config();
  Model model(cpu, c, Dtype::fp32);
  set_random_weights(model);
  std::vector<float> gamma(static_cast<size_t>(c.hidden), INFINITY);
  model.set_tensor("model.norm.weight", gamma);
  model.weights_changed();
  std::vector<float> before, after;
  append_state(before, model);
  const Data data(c.vocab);
  model.forward_backward(data.batch(), 1);
  EXPECT_FALSE(std::isfinite(model.update({})));
  EXPECT_EQ(model.updates(), 0);
  append_state(after, model);
  EXPECT_EQ(before, after);
}

TEST(Model, NamesTheFirstValueThatIsNotFinite) {
  Cpu cpu(1);
  const Config c = small_config();
  const Data data(c.vocab);
  struct Poison {
    std::vector<std::pair<const char*, float>> fills;  // tensors, and what all of their elements become
    const char* says;
    Dtype dtype = Dtype::fp32;
  };
  const Poison poisons[] = {
      {{{"model.layers.1.self_attn.v_proj.weight", 3e38f}}, "layer 1, qkv, row 0, column "},
      {{{"model.layers.1.self_attn.o_proj.weight", 3e38f}}, "layer 1, h_mid, row "},
      {{{"model.layers.0.mlp.gate_proj.weight", 3e38f}}, "layer 0, gate_up, row "},
      {{{"model.layers.1.mlp.gate_proj.weight", 1e25f}, {"model.layers.1.mlp.up_proj.weight", 1e25f}},
       "layer 1, y, row "},
      {{{"model.layers.0.mlp.down_proj.weight", 3e38f}}, "layer 0, h, row "},
      {{{"lm_head.weight", 3e38f}}, "the logits of token "},
      {{{"model.embed_tokens.weight", 3.4e38f}}, "the embedding of the tokens, row 0, column 0 (inf)", Dtype::bf16},
  };
  for (const Poison& poison : poisons) {
    Model model(cpu, c, poison.dtype);
    set_random_weights(model);
    EXPECT_EQ(model.find_not_finite(data.batch()), std::nullopt);
    for (const auto& [name, value] : poison.fills) {
      for (const TensorInfo& info : model.tensors()) {
        if (info.name == name) model.set_tensor(name, std::vector<float>(static_cast<size_t>(info.size()), value));
      }
    }
    model.weights_changed();
    EXPECT_FALSE(std::isfinite(model.loss(data.batch()))) << poison.says;
    const std::string found = model.find_not_finite(data.batch()).value_or("nothing");
    EXPECT_TRUE(found.starts_with(poison.says)) << found << "\n  not: " << poison.says;
  }

  Model model(cpu, c, Dtype::fp32);
  set_random_weights(model);
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  std::vector<float> value(static_cast<size_t>(c.ffn * c.hidden));
  model.get_tensor(name, value);
  value[static_cast<size_t>(3 * c.hidden + 5)] = -NAN;
  value[static_cast<size_t>(4 * c.hidden)] = INFINITY;
  model.set_tensor(name, value);
  EXPECT_EQ(model.find_not_finite(data.batch()), "the weight " + name + ", row 3, column 5 (nan)");
}

TEST(Model, NamesTheFirstGradientThatIsNotFinite) {
  Cpu cpu(1);
  const Config c = small_config();
  const Data data(c.vocab);
  Model model(cpu, c, Dtype::fp32);
  set_random_weights(model);
  model.forward_backward(data.batch(), 4e-39);
  EXPECT_EQ(model.find_not_finite(data.batch()), std::nullopt);
  EXPECT_FALSE(std::isfinite(model.update({})));
  const std::string found = model.find_not_finite_gradient().value_or("nothing");
  EXPECT_TRUE(found.starts_with("the gradient of lm_head.weight, row ")) << found;
  // Every gradient is finite, but their squares are not.
  model.forward_backward(data.batch(), 1e-25);
  EXPECT_EQ(model.update({}), INFINITY);
  EXPECT_EQ(model.find_not_finite_gradient(), std::nullopt);
}

TEST(Model, LookingForWhatIsNotFiniteLeavesTheGradients) {
  Cpu cpu(1);
  const Config c = small_config();
  const Data data(c.vocab);
  double norms[2];
  for (const bool look : {false, true}) {
    Model model(cpu, c, Dtype::fp32);
    set_random_weights(model);
    model.forward_backward(data.batch(), 7);
    if (look) {
      EXPECT_EQ(model.find_not_finite(data.batch()), std::nullopt);
    }
    model.forward_backward(data.batch(), 7);
    norms[look] = model.update({});
  }
  EXPECT_EQ(norms[0], norms[1]);
}

TEST(Model, IsRefusedIfTheMachineCannotHoldIt) {
  Cpu cpu(1);
  Config c = small_config();
  c.hidden = c.ffn = int64_t{1} << 24;
  try {
    Model model(cpu, c, Dtype::fp32);
    FAIL();
  } catch (const coda::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("parameters with their gradients"), std::string::npos) << error.what();
  }
}

TEST(Model, DecoderContinuesLikeTheWholeContext) {
  Cpu cpu(2);
  Config c = small_config();
  c.max_positions = 32;
  Model model(cpu, c, Dtype::fp32);
  const Doubles weights = set_random_weights(model);
  const Data data(c.vocab, {20});
  Decoder decoder(model);
  std::span<const int32_t> tokens(data.tokens);
  std::vector<float> logits;
  for (size_t first : {0, 9, 10, 14}) {
    const size_t end = first == 0 ? 9 : first == 9 ? 10 : first == 10 ? 14 : 20;
    const std::span<const float> got = decoder.feed(tokens.subspan(first, end - first));
    // -log p of every token, from logits and from the definition.
    double sum = 0;
    for (float x : got) sum += std::exp(static_cast<double>(x));
    for (int32_t target = 0; target < 5; ++target) {
      std::vector<int32_t> context(tokens.begin(), tokens.begin() + static_cast<long>(end)), targets(end, -100);
      targets.back() = target;
      const double want = reference::loss(c, weights, context, targets, {0, static_cast<int64_t>(end)});
      EXPECT_NEAR(std::log(sum) - static_cast<double>(got[static_cast<size_t>(target)]), want, 1e-5);
    }
  }
  EXPECT_THROW(decoder.feed(tokens.first(13)), coda::UsageError);
}

TEST(Model, RefusesIdsOutsideTheVocabulary) {
  Cpu cpu(1);
  const Config c = small_config();
  Model model(cpu, c, Dtype::fp32);
  model.initialize(1);
  Data data(c.vocab);
  data.targets[4] = 40;
  try {
    model.loss(data.batch());
    FAIL();
  } catch (const coda::OperandError& e) {
    EXPECT_EQ(e.operand(), "target of row 4");
    EXPECT_EQ(e.got(), "40");
  }
  data.targets[4] = -5;
  EXPECT_THROW(model.loss(data.batch()), coda::OperandError);
  data.targets[4] = 1;
  data.tokens[2] = -1;
  EXPECT_THROW(model.forward_backward(data.batch(), 1), coda::OperandError);
  data.tokens[2] = 1;
  EXPECT_THROW(model.forward_backward(data.batch(), 0), coda::UsageError);
}

TEST(Model, TensorsRoundTripThroughPackedOrder) {
  Cpu cpu(1);
  Config c = small_config();
  Model model(cpu, c, Dtype::fp32);
  for (const TensorInfo& info : model.tensors()) {
    std::vector<float> value(static_cast<size_t>(info.size())), back(value.size());
    for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<float>(i);
    model.set_tensor(info.name, value);
    model.get_tensor(info.name, back);
    EXPECT_EQ(value, back) << info.name;
  }
  EXPECT_THROW(model.set_tensor("model.nothing", std::vector<float>(3)), coda::UsageError);
  EXPECT_THROW(model.set_tensor("model.norm.weight", std::vector<float>(3)), coda::OperandError);
}

}  // namespace
