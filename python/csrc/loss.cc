// The vocabulary loss, in chunks of tokens (coda/loss.h).
#include "coda/loss.h"

#include "operators.h"
#include "weight.h"

namespace coda::torch_ops {

namespace {

template <class E>
struct Head {
  Tensor weight;  // in E
  LinearHead<E> views;

  template <class Engine>
  Head(Engine& engine, const Tensor& x, const Tensor& of, const Tensor& label,
       const std::optional<Tensor>& token_weight)
      : weight(packed<E>(engine, Weight{{{"weight", of, {}}}, std::nullopt})),
        views{.h = matrix<const E>(x, "x"),
              .inv_rms = {},
              .weight = matrix<const E>(weight, "weight"),
              .label = vector<const int32_t>(label, "labels"),
              .token_weight = {}} {
    if (token_weight) views.token_weight = vector<const float>(*token_weight, "token_weight");
  }
};

Tensor scalar(double value, const Tensor& like) {
  return torch::stable::full({}, value, ScalarType::Float, std::nullopt, like.device());
}

/// The loss's calls, on either engine.
template <class Engine, class E>
struct Loss {
  LinearCrossEntropy<E> loss;
  Loss(Engine&, const Head<E>&, const CrossEntropyOptions&, const LinearHeadGradients<E>&) {}

  Tensors2 forward(Engine& engine, const Head<E>& head, const CrossEntropyOptions& options, const TokenLosses& tokens) {
    return values(loss.forward(engine, head.views, options, tokens), head);
  }
  Tensors2 forward_backward(Engine& engine, const Head<E>& head, const CrossEntropyOptions& options,
                            Vector<const float> d_loss, const LinearHeadGradients<E>& gradients,
                            const TokenLosses& tokens) {
    return values(loss.forward_backward(engine, head.views, options, d_loss, gradients, tokens), head);
  }
  void backward(Engine& engine, const Head<E>& head, const CrossEntropyOptions& options,
                Vector<const float> log_sum_exp, Vector<const float> d_loss, const LinearHeadGradients<E>& gradients) {
    loss.backward(engine, head.views, options, log_sum_exp, d_loss, gradients);
  }

 private:
  static Tensors2 values(const LossValue& value, const Head<E>& head) {
    return {scalar(value.value(), head.weight), scalar(value.z_value(), head.weight)};
  }
};

#ifdef CODA_TORCH_GPU
/// Of two of the doubles in value, without waiting for them.
Tensor quotient(const Tensor& value, int64_t of) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(torch::stable::select(value, 0, of)),
                                    torch::stable::detail::from(torch::stable::select(value, 0, 2))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::div", "Tensor", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::to(torch::stable::detail::to<Tensor>(stack[0]), ScalarType::Float);
}

template <>
struct Loss<TorchGpu, bf16> {
  Tensor memory, workspace;
  std::optional<GpuLinearCrossEntropy> loss;
  Gpu gpu;

  Loss(TorchGpu& engine, const Head<bf16>& head, const CrossEntropyOptions& options,
       const LinearHeadGradients<bf16>& gradients)
      : gpu(engine) {
    const GpuLossSize size{.tokens = head.views.h.rows,
                           .vocab = head.views.weight.rows,
                           .gradients = gradients.d_h.data != nullptr || gradients.d_weight.data != nullptr};
    memory = engine.bytes(GpuLinearCrossEntropy::memory_bytes(size));
    loss.emplace(engine, size, memory.data_ptr());
    const int64_t bytes = loss->workspace(head.views, options, gradients);
    if (bytes == 0) return;
    workspace = engine.bytes(bytes);
    gpu.set_workspace(workspace.data_ptr(), bytes);
  }

  Tensors2 forward(TorchGpu&, const Head<bf16>& head, const CrossEntropyOptions& options, const TokenLosses& tokens) {
    return values(
        head, [&](LossValue* value) { loss->forward(gpu, head.views, options, value, tokens); }, options);
  }
  Tensors2 forward_backward(TorchGpu&, const Head<bf16>& head, const CrossEntropyOptions& options,
                            Vector<const float> d_loss, const LinearHeadGradients<bf16>& gradients,
                            const TokenLosses& tokens) {
    return values(
        head,
        [&](LossValue* value) { loss->forward_backward(gpu, head.views, options, d_loss, gradients, value, tokens); },
        options);
  }
  void backward(TorchGpu&, const Head<bf16>& head, const CrossEntropyOptions& options, Vector<const float> log_sum_exp,
                Vector<const float> d_loss, const LinearHeadGradients<bf16>& gradients) {
    loss->backward(gpu, head.views, options, log_sum_exp, d_loss, gradients);
  }

 private:
  template <class Run>
  static Tensors2 values(const Head<bf16>& head, const Run& run, const CrossEntropyOptions& options) {
    static_assert(sizeof(LossValue) == 3 * sizeof(double));  // sum, z_sum, divisor
    const Tensor value = empty(head.weight, {3}, ScalarType::Double);
    run(static_cast<LossValue*>(value.data_ptr()));
    return {quotient(value, 0), options.z_loss > 0 ? quotient(value, 1) : scalar(0, head.weight)};
  }
};
#endif

CrossEntropyOptions options_of(int64_t reduction, std::optional<double> divisor, int64_t ignore_index,
                               double label_smoothing, double z_loss, std::optional<double> softcap) {
  return {.reduction = reduction == 0   ? Reduction::none
                       : reduction == 1 ? Reduction::sum
                                        : Reduction::mean,
          .divisor = divisor,
          .ignore_index = static_cast<int32_t>(ignore_index),
          .label_smoothing = label_smoothing,
          .z_loss = z_loss,
          .softcap = softcap};
}

/// Memory of the gradients, the weight's in float.
template <class E>
struct Gradients {
  Tensor d_x, d_weight;
  LinearHeadGradients<E> views;

  Gradients(const Tensor& x, const Tensor& weight, bool needed)
      : d_x(empty<E>(x, {needed ? x.size(0) : 0, x.size(1)})),
        d_weight(empty<float>(x, {needed ? weight.size(0) : 0, weight.size(1)})) {
    if (needed) views = {.d_h = matrix<E>(d_x, "d_x"), .d_weight = matrix<float>(d_weight, "d_weight")};
  }
  Tensor weight_in(ScalarType type) const {
    return type == ScalarType::Float ? d_weight : torch::stable::to(d_weight, type);
  }
};

}  // namespace

Tensors5 linear_cross_entropy(Tensor x, Tensor weight, Tensor label, std::optional<Tensor> token_weight,
                              int64_t reduction, std::optional<double> divisor, int64_t ignore_index,
                              double label_smoothing, double z_loss, std::optional<double> softcap, int64_t mask) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    const CrossEntropyOptions options = options_of(reduction, divisor, ignore_index, label_smoothing, z_loss, softcap);
    const bool none = reduction == 0;
    const int64_t m = x.size(0);
    const Head<E> head(engine, x, weight, label, token_weight);
    // The upstream gradient of a sum is one number, which scales gradients that are made here, beside the loss.
    const Gradients<E> gradients(x, weight, mask != 0 && !none);
    Tensor per_token = empty<float>(x, {none ? m : 0}), z_per_token = empty<float>(x, {none ? m : 0}),
           log_sum_exp = empty<float>(x, {m});
    const TokenLosses tokens{.loss = vector<float>(per_token, "loss"),
                             .z_loss = vector<float>(z_per_token, "z_loss"),
                             .log_sum_exp = vector<float>(log_sum_exp, "log_sum_exp")};
    Loss<Engine, E> loss(engine, head, options, gradients.views);
    std::optional<Tensors2> values;
    if (mask != 0 && !none) {
      const Tensor one = scalar(1, x);
      values =
          loss.forward_backward(engine, head, options, vector<const float>(one, "d_loss"), gradients.views, tokens);
    } else {
      values = loss.forward(engine, head, options, tokens);
    }
    if (none) return Tensors5{per_token, z_per_token, log_sum_exp, gradients.d_x, gradients.d_weight};
    return Tensors5{std::get<0>(*values), std::get<1>(*values), log_sum_exp, gradients.d_x, gradients.d_weight};
  });
}

Tensors2 linear_cross_entropy_backward(Tensor d_loss, Tensor x, Tensor weight, Tensor label,
                                       std::optional<Tensor> token_weight, Tensor log_sum_exp, int64_t reduction,
                                       std::optional<double> divisor, int64_t ignore_index, double label_smoothing,
                                       double z_loss, std::optional<double> softcap) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    const CrossEntropyOptions options = options_of(reduction, divisor, ignore_index, label_smoothing, z_loss, softcap);
    const Head<E> head(engine, x, weight, label, token_weight);
    const Gradients<E> gradients(x, weight, true);
    Loss<Engine, E> loss(engine, head, options, gradients.views);
    loss.backward(engine, head, options, vector<const float>(log_sum_exp, "log_sum_exp"),
                  vector<const float>(d_loss, "d_loss"), gradients.views);
    return Tensors2{gradients.d_x, gradients.weight_in(weight.scalar_type())};
  });
}

}  // namespace coda::torch_ops
