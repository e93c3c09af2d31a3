// What a model is to an engine: the part behind llama::Model, and what every engine's has in common.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layer.h"
#include "model.h"
#include "not_finite.h"
#include "parameters.h"
#include "rope.h"

namespace coda::llama {

struct Decoder::Impl {
  virtual ~Impl() = default;
  virtual std::span<const float> feed(std::span<const int32_t> tokens) = 0;
};

struct Model::Impl {
  Impl(const Config& config_, Dtype dtype_)
      : config(config_), dtype(dtype_), turns(rotary_turns(config_)), parameters(config_) {}
  virtual ~Impl() = default;

  /// The batch's loss; with a divisor, gradients too.
  virtual double run(const Batch& batch, std::optional<double> divisor) = 0;
  virtual std::optional<std::string> find_not_finite_activation(const Batch& batch) = 0;
  virtual double update(const AdamW& options) = 0;
  virtual void weights_changed() = 0;
  virtual std::unique_ptr<Decoder::Impl> decoder() = 0;
  /// A parameter's values, where the host can reach them: the model's own memory, or a copy that stays until the next call.
  virtual Matrix<float> on_host(int parameter, Values which) = 0;
  /// The same for values that are all written before anything reads them: not what the engine has now.
  virtual Matrix<float> to_overwrite(int parameter, Values which) { return on_host(parameter, which); }
  /// Takes over what on_host() or to_overwrite() gave last, changed.
  virtual void host_changed(int parameter, Values which) = 0;

  const Config config;
  const Dtype dtype;
  const RotaryTurns turns;
  const Parameters parameters;
  int64_t updates = 0;
  bool gradients_started = false;
};

/// Activations of a pass over up to tokens tokens; what they take is pass_bytes (counted.h).
template <class Engine, class E>
struct Pass {
  Pass(const Config& config, int64_t tokens_, bool backward_)
      : tokens(tokens_), backward(backward_), workspace(config, tokens_, backward_) {
    // Without a backward pass two streams take turns and one tape serves every layer.
    for (int64_t l = 0; l < (backward ? config.layers + 1 : 2); ++l) {
      h.emplace_back(tokens, config.hidden);
      inv_rms.emplace_back(1, tokens);
    }
    for (int64_t l = 0; l < (backward ? config.layers : 1); ++l) tapes.emplace_back(config, tokens, backward);
    if (backward) d_h = BufferOn<Engine, E>(tokens, config.hidden);
  }
  Stream<E> stream(int64_t layer, int64_t m) {
    const size_t i = backward ? static_cast<size_t>(layer) : static_cast<size_t>(layer % 2);
    return {h[i].top(m), inv_rms[i].vector(m)};
  }
  LayerTape<Engine, E>& tape(int64_t layer) { return tapes[backward ? static_cast<size_t>(layer) : 0]; }

  int64_t tokens;
  bool backward;
  std::vector<BufferOn<Engine, E>> h;  // the stream in front of every layer, and behind the last
  std::vector<BufferOn<Engine, float>> inv_rms;
  std::vector<LayerTape<Engine, E>> tapes;
  LayerWorkspace<Engine, E> workspace;
  BufferOn<Engine, E> d_h;
};

/// weight(index): the matrix that products read of a parameter.
template <class E, class Weight>
LayerWeights<E> layer_weights(const Parameters& parameters, int64_t layer, const Weight& weight) {
  return {.qkv = weight(parameters.qkv(layer)),
          .o = weight(parameters.o(layer)),
          .gate_up = weight(parameters.gate_up(layer)),
          .down = weight(parameters.down(layer))};
}
/// gradient(index): the matrix that a weight's gradient goes to.
template <class Gradient>
LayerGradients layer_gradients(const Parameters& parameters, int64_t layer, const Gradient& gradient) {
  return {.qkv = gradient(parameters.qkv(layer)),
          .o = gradient(parameters.o(layer)),
          .gate_up = gradient(parameters.gate_up(layer)),
          .down = gradient(parameters.down(layer))};
}

/// The first value that is not finite in what a layer has just made. on_host(matrix): its values where the host can read them.
template <class Engine, class E, class OnHost>
std::optional<std::string> find_not_finite_in_layer(int64_t layer, int64_t tokens, LayerTape<Engine, E>& tape,
                                                    LayerWorkspace<Engine, E>& workspace, Matrix<E> h,
                                                    const OnHost& on_host) {
  std::optional<std::string> found;
  const auto find = [&](const char* name, Matrix<E> values) {
    if (!found) found = find_not_finite(fmt::format("layer {}, {}", layer, name), on_host(values));
  };
  find("qkv", tape.qkv.top(tokens));
  find("attention", tape.attention.top(tokens));
  find("h_mid", tape.h_mid.top(tokens));
  find("gate_up", tape.gate_up.top(tokens));
  find("y", workspace.y.top(tokens));
  find("h", h);
  return found;
}

inline constexpr const char* kEmbeddingOfTokens = "the embedding of the tokens";

}  // namespace coda::llama
