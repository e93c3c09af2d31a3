// The cases of one product, and the loss.
#include <optional>

#include "bench/gpu.h"
#include "bench/torch/case.h"
#include "coda/finish.h"
#include "coda/loss.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/swiglu.h"
#include "coda/rotary.h"
#include "operand_shape.h"

namespace coda::bench {

namespace {

constexpr int64_t kHeadDim = 128;
constexpr double kEps = 1e-6;

DeviceTensor<float> row_slots(int64_t tokens, int64_t cols) {
  return {detail::row_slot_count(cols), tokens};
}
PackedOrder gate_up_order(int64_t ffn) {
  return {.group = 2 * ffn, .end = 2 * ffn};
}

/// qkv = rotate(r ⊙ (x Wqkvᵀ)).
class RopeCase : public Case {
 public:
  RopeCase(int64_t tokens, int64_t d, const Inputs& in)
      : x_(in.matrix("x", tokens, d)),
        inv_rms_(in.get<float>("inv_rms"), tokens),
        order_{.group = kHeadDim, .end = 2 * d},
        weight_(packed(in.matrix("wqkv", 3 * d, d), {.rows = order_})),
        rotation_(rotation_of(tokens, 3 * d, 2 * d, kHeadDim)),
        qkv_(tokens, 3 * d) {}

  void run(const Gpu& gpu) override {
    gemm(gpu, x_, weight_.matrix(),
         RmsNormRope<>{.inv_rms = inv_rms_,
                       .position = rotation_.position.vector(),
                       .turns_high = rotation_.turns_high.vector(),
                       .turns_low = rotation_.turns_low.vector(),
                       .qkv = qkv_.matrix()});
  }
  void result(std::string_view name, void* out) const override {
    if (name != "qkv") throw_no_output(name);
    const Matrix<bf16> qkv = qkv_.matrix();
    unpack<bf16, bf16>(qkv, {.cols = order_}, {static_cast<bf16*>(out), qkv.rows, qkv.cols});
  }

 private:
  Matrix<const bf16> x_;
  Vector<const float> inv_rms_;
  PackedOrder order_;
  DeviceTensor<bf16> weight_;
  Rotation rotation_;
  DeviceTensor<bf16> qkv_;
};

/// z = r ⊙ (x Wguᵀ), y = swiglu(z).
class SwigluCase : public Case {
 public:
  SwigluCase(int64_t tokens, int64_t d, int64_t ffn, const Inputs& in)
      : x_(in.matrix("x", tokens, d)),
        inv_rms_(in.get<float>("inv_rms"), tokens),
        order_(gate_up_order(ffn)),
        weight_(packed(in.matrix("wgu", 2 * ffn, d), {.rows = order_})),
        z_(tokens, 2 * ffn),
        y_(tokens, ffn) {}

  void run(const Gpu& gpu) override {
    gemm(gpu, x_, weight_.matrix(),
         RmsNormSwiGlu<>{.f = {}, .inv_rms = inv_rms_, .gate_up = z_.matrix(), .y = y_.matrix()});
  }
  void result(std::string_view name, void* out) const override {
    const Matrix<bf16> from = name == "y" ? y_.matrix() : z_.matrix();
    if (name != "y" && name != "z") throw_no_output(name);
    unpack<bf16, bf16>(from, {.cols = name == "z" ? order_ : PackedOrder{}},
                       {static_cast<bf16*>(out), from.rows, from.cols});
  }

 private:
  Matrix<const bf16> x_;
  Vector<const float> inv_rms_;
  PackedOrder order_;
  DeviceTensor<bf16> weight_, z_, y_;
};

/// h = x Woᵀ + residual, and 1/rms of it.
class ResidualCase : public Case {
 public:
  ResidualCase(int64_t tokens, int64_t d, const Inputs& in)
      : x_(in.matrix("x", tokens, d)),
        weight_(in.matrix("wo", d, d)),
        residual_(in.matrix("residual", tokens, d)),
        h_(tokens, d),
        sum_sq_(row_slots(tokens, d)),
        inv_rms_(1, tokens) {}

  void run(const Gpu& gpu) override {
    gemm(gpu, x_, weight_,
         Residual<>{.residual = residual_, .gamma = {}, .h = h_.matrix(), .x = {}, .sum_sq = sum_sq_.matrix()});
    inv_rms(gpu, sum_sq_.matrix(), x_.cols, kEps, inv_rms_.vector());
  }
  void result(std::string_view name, void* out) const override {
    if (name != "h") throw_no_output(name);
    unpack<bf16, bf16>(h_.matrix(), {}, {static_cast<bf16*>(out), x_.rows, x_.cols});
  }

 private:
  Matrix<const bf16> x_, weight_, residual_;
  DeviceTensor<bf16> h_;
  DeviceTensor<float> sum_sq_, inv_rms_;
};

/// The gradient of y = swiglu(z) from dh Wd, times r; y again; s of the norm in front.
class SwigluBackwardCase : public Case {
 public:
  SwigluBackwardCase(int64_t tokens, int64_t d, int64_t ffn, const Inputs& in)
      : d_h_(in.matrix("dh", tokens, d)),
        weight_(in.matrix("wd", d, ffn)),
        inv_rms_(in.get<float>("inv_rms"), tokens),
        ffn_(ffn),
        z_(packed(in.matrix("z", tokens, 2 * ffn), {.cols = gate_up_order(ffn)})),
        d_z_(tokens, 2 * ffn),
        y_(tokens, ffn),
        dot_z_(row_slots(tokens, ffn)),
        mean_dot_(1, tokens) {}

  void run(const Gpu& gpu) override {
    gemm(gpu, d_h_, transpose(weight_),
         SwiGluBackward<>{.f = {},
                          .inv_rms = inv_rms_,
                          .gate_up = z_.matrix(),
                          .d_gate_up = d_z_.matrix(),
                          .y = y_.matrix(),
                          .dot_z = dot_z_.matrix()});
    mean_dot(gpu, dot_z_.matrix(), d_h_.cols, mean_dot_.vector());
  }
  void result(std::string_view name, void* out) const override {
    const Matrix<bf16> to(static_cast<bf16*>(out), d_h_.rows, ffn_);
    if (name == "y") return unpack<bf16, bf16>(y_.matrix(), {}, to);
    if (name != "d_gate" && name != "d_up") throw_no_output(name);
    unpack<bf16, bf16>(d_z_.matrix(), {.cols = gate_up_order(ffn_)}, to, name == "d_gate" ? 0 : ffn_);
  }

 private:
  Matrix<const bf16> d_h_, weight_;
  Vector<const float> inv_rms_;
  int64_t ffn_;
  DeviceTensor<bf16> z_, d_z_, y_;
  DeviceTensor<float> dot_z_, mean_dot_;
};

/// dh = dz W̃gu − r²·s·h + d_residual. r and s are some numbers: the time does not depend on them, and PyTorch's result is not
/// compared.
class NormBackwardCase : public Case {
 public:
  NormBackwardCase(int64_t tokens, int64_t d, int64_t ffn, const Inputs& in)
      : h_(in.matrix("h", tokens, d)),
        d_residual_(in.matrix("d_residual", tokens, d)),
        weight_(packed(in.matrix("wgu", 2 * ffn, d), {.rows = gate_up_order(ffn)}, in.get<bf16>("gamma"))),
        d_z_(packed(in.matrix("dz", tokens, 2 * ffn), {.cols = gate_up_order(ffn)})),
        inv_rms_(std::vector<float>(static_cast<size_t>(tokens), 1.F)),
        mean_dot_(std::vector<float>(static_cast<size_t>(tokens), 0.1F)),
        d_h_(tokens, d) {}

  void run(const Gpu& gpu) override {
    gemm(gpu, d_z_.matrix(), transpose(weight_.matrix()),
         RmsNormBackward<>{.inv_rms = inv_rms_.vector(),
                           .mean_dot = mean_dot_.vector(),
                           .h = h_,
                           .d_residual = d_residual_,
                           .gamma = {},
                           .d_h = d_h_.matrix(),
                           .d_gamma = {}});
  }
  void result(std::string_view name, void* /*out*/) const override { throw_no_output(name); }

 private:
  Matrix<const bf16> h_, d_residual_;
  DeviceTensor<bf16> weight_, d_z_;
  DeviceTensor<float> inv_rms_, mean_dot_;
  DeviceTensor<bf16> d_h_;
};

/// Mean cross-entropy of x Wlmᵀ, and its gradients.
class LossCase : public Case {
 public:
  LossCase(int64_t tokens, int64_t d, bool gradients, const Inputs& in)
      : loss_(Gpu(), {.tokens = tokens, .vocab = kVocab, .gradients = gradients}),
        label_(1, tokens),
        value_(1, 1),
        one_(std::vector<float>{1}),
        head_{.h = in.matrix("x", tokens, d),
              .inv_rms = {},
              .weight = in.matrix("wlm", kVocab, d),
              .label = label_.vector(),
              .token_weight = {}} {
    narrow({in.get<int64_t>("labels"), tokens}, label_.vector());
    if (!gradients) return;
    d_x_.emplace(tokens, d);
    d_weight_.emplace(kVocab, d);
  }

  void run(const Gpu& gpu) override {
    if (d_x_)
      loss_.forward_backward(gpu, head_, {}, one_.vector(), {.d_h = d_x_->matrix(), .d_weight = d_weight_->matrix()},
                             value_.matrix().data);
    else
      loss_.forward(gpu, head_, {}, value_.matrix().data);
  }
  void result(std::string_view name, void* out) const override {
    if (name == "loss") {
      LossValue value;
      check_cuda(cudaMemcpy(&value, value_.matrix().data, sizeof value, cudaMemcpyDeviceToHost), "cudaMemcpy");
      return upload(std::vector<float>{static_cast<float>(value.value())}, static_cast<float*>(out));
    }
    if (!d_x_ || (name != "d_x" && name != "d_wlm")) throw_no_output(name);
    auto* to = static_cast<bf16*>(out);
    if (name == "d_x") return unpack<bf16, bf16>(d_x_->matrix(), {}, {to, head_.h.rows, head_.h.cols});
    unpack<float, bf16>(d_weight_->matrix(), {}, {to, kVocab, head_.h.cols});
  }

 private:
  GpuLinearCrossEntropy loss_;
  DeviceTensor<int32_t> label_;
  DeviceTensor<LossValue> value_;
  DeviceTensor<float> one_;
  LinearHead<bf16> head_;
  std::optional<DeviceTensor<bf16>> d_x_;
  std::optional<DeviceTensor<float>> d_weight_;
};

}  // namespace

Rotation rotation_of(int64_t tokens, int64_t cols, int64_t turned, int64_t head_dim) {
  constexpr int64_t kDocument = 8192;
  constexpr double kTheta = 1e4;
  std::vector<int32_t> position;
  for (int64_t i = 0; i < tokens; ++i) position.push_back(static_cast<int32_t>(i % kDocument));
  const std::vector<float> head = rotary_frequencies(head_dim, head_dim, kTheta);
  std::vector<float> radians;
  for (int64_t pair = 0; pair < cols / 2; ++pair)
    radians.push_back(2 * pair < turned ? head[static_cast<size_t>(pair) % head.size()] : 0.F);
  const RotaryTurns turns = to_turns(radians);
  return {DeviceTensor<int32_t>(position), DeviceTensor<float>(turns.high), DeviceTensor<float>(turns.low)};
}

std::unique_ptr<Case> make_product_case(std::string_view name, int64_t d, const Inputs& inputs) {
  const int64_t ffn = gpu_ffn(d);
  if (name == "op.rope") return std::make_unique<RopeCase>(kTokens, d, inputs);
  if (name == "op.swiglu") return std::make_unique<SwigluCase>(kTokens, d, ffn, inputs);
  if (name == "op.residual_rms") return std::make_unique<ResidualCase>(kTokens, d, inputs);
  if (name == "op.swiglu_b") return std::make_unique<SwigluBackwardCase>(kTokens, d, ffn, inputs);
  if (name == "op.norm_b") return std::make_unique<NormBackwardCase>(kTokens, d, ffn, inputs);
  if (name == "op.loss") return std::make_unique<LossCase>(kLossTokens, d, false, inputs);
  if (name == "op.loss_fb") return std::make_unique<LossCase>(kLossTokens, d, true, inputs);
  if (name == "sq.rope") return std::make_unique<RopeCase>(d, d, inputs);
  if (name == "sq.swiglu") return std::make_unique<SwigluCase>(d, d, d / 2, inputs);
  if (name == "sq.loss") return std::make_unique<LossCase>(d, d, false, inputs);
  return nullptr;
}

}  // namespace coda::bench
