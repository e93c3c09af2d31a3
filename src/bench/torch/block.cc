// The block: what stands between attention's output and the next layer's q, k and v, forward and backward, in the order of the
// tables of llama/layer.h. Gradients of weights are those of the weights themselves, not of the folded ones, and of both gammas.
#include <algorithm>
#include <optional>

#include "bench/gpu.h"
#include "bench/torch/case.h"
#include "coda/finish.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "operand_shape.h"

namespace coda::bench {

namespace {

constexpr double kEps = 1e-6;

struct Shape {
  int64_t d, ffn, qk, qkv, head_dim;  // qk columns of q and k in front of those of v, qkv of all

  PackedOrder gate_up() const { return {.group = 2 * ffn, .end = 2 * ffn}; }
  PackedOrder heads() const { return {.group = head_dim, .end = qk}; }
};

/// Llama 3's 1B, 8B and 70B; other widths are shaped like them.
Shape llama_shape(int64_t d) {
  if (d == 2048) return {.d = d, .ffn = 8192, .qk = d + 512, .qkv = d + 1024, .head_dim = 64};
  if (d == 4096) return {.d = d, .ffn = 14336, .qk = d + 1024, .qkv = d + 2048, .head_dim = 128};
  if (d == 8192) return {.d = d, .ffn = 28672, .qk = d + 1024, .qkv = d + 2048, .head_dim = 128};
  return {.d = d, .ffn = 4 * d, .qk = d + d / 4, .qkv = d + d / 2, .head_dim = 128};
}
Shape block_shape(int64_t d) {
  return {.d = d, .ffn = gpu_ffn(d), .qk = 2 * d, .qkv = 3 * d, .head_dim = 128};
}

/// Of a norm's weight gamma, and of the weight behind it, which products read as one.
struct NormGradient {
  DeviceTensor<bf16> weight;     // [N, d]  packed, not folded
  DeviceTensor<float> gamma;     // [d]
  DeviceTensor<float> d_weight;  // [N, d]
  DeviceTensor<float> d_gamma_slots;
  DeviceTensor<float> d_gamma;  // [d]

  NormGradient(Matrix<const bf16> plain, const PackedOrder& rows, const bf16* gamma_)
      : weight(packed(plain, {.rows = rows})),
        gamma(packed<float>({gamma_, 1, plain.cols}, {})),
        d_weight(plain.rows, plain.cols),
        d_gamma_slots(coda::detail::column_slot_count(plain.rows), plain.cols),
        d_gamma(1, plain.cols) {}

  /// From what is behind the product (d_y) and in front of it (h).
  void run(const Gpu& gpu, const Matrix<const bf16>& d_y, const Matrix<const bf16>& h) const {
    gemm(gpu, transpose(d_y), transpose(h),
         FoldedWeightGradient<>{.gamma = gamma.vector(),
                                .weight = weight.matrix(),
                                .d_weight = d_weight.matrix(),
                                .d_gamma = d_gamma_slots.matrix()});
    total(gpu, d_gamma_slots.matrix(), d_gamma.vector());
  }
};

/// What only a backward pass needs.
struct Backward {
  Matrix<const bf16> d_h2;                 // [M, d]  upstream
  DeviceTensor<bf16> d_qkv;                // [M, qkv]  upstream, packed
  DeviceTensor<bf16> gate_up, d_gate_up;   // [M, 2F]
  DeviceTensor<bf16> d_qkv_scaled;         // [M, qkv]
  DeviceTensor<bf16> d_h2_all, d_h1, d_a;  // [M, d]
  DeviceTensor<float> mean_dot;            // [M]
  DeviceTensor<float> d_wo, d_wd;          // [d, d], [d, F]
  NormGradient mlp, attention;             // of g2 and wgu, of g1 and wqkv

  Backward(const Shape& s, const Inputs& in)
      : d_h2(in.matrix("d_h2", kTokens, s.d)),
        d_qkv(packed(in.matrix("d_qkv", kTokens, s.qkv), {.cols = s.heads()})),
        gate_up(kTokens, 2 * s.ffn),
        d_gate_up(kTokens, 2 * s.ffn),
        d_qkv_scaled(kTokens, s.qkv),
        d_h2_all(kTokens, s.d),
        d_h1(kTokens, s.d),
        d_a(kTokens, s.d),
        mean_dot(1, kTokens),
        d_wo(s.d, s.d),
        d_wd(s.d, s.ffn),
        mlp(in.matrix("wgu", 2 * s.ffn, s.d), s.gate_up(), in.get<bf16>("g2")),
        attention(in.matrix("wqkv", s.qkv, s.d), s.heads(), in.get<bf16>("g1")) {}
};

void weight_gradient(const Gpu& gpu, const Matrix<const bf16>& a, const Matrix<const bf16>& b,
                     const DeviceTensor<float>& out) {
  gemm(gpu, transpose(a), transpose(b), Store<Tensors<bf16>, float>{.out = out.matrix()});
}

class BlockCase : public Case {
 public:
  BlockCase(const Shape& shape, bool backward, const Inputs& in)
      : s_(shape),
        a_(in.matrix("a", kTokens, s_.d)),
        h0_(in.matrix("h0", kTokens, s_.d)),
        wo_(in.matrix("wo", s_.d, s_.d)),
        wd_(in.matrix("wd", s_.d, s_.ffn)),
        wgu_(packed(in.matrix("wgu", 2 * s_.ffn, s_.d), {.rows = s_.gate_up()}, in.get<bf16>("g2"))),
        wqkv_(packed(in.matrix("wqkv", s_.qkv, s_.d), {.rows = s_.heads()}, in.get<bf16>("g1"))),
        rotation_(rotation_of(kTokens, s_.qkv, s_.qk, s_.head_dim)),
        h1_(kTokens, s_.d),
        y_(kTokens, s_.ffn),
        h2_(kTokens, s_.d),
        qkv_(kTokens, s_.qkv),
        partial_(detail::row_slot_count(std::max({s_.d, s_.ffn, s_.qkv})), kTokens),
        r1_(1, kTokens),
        r2_(1, kTokens) {
    if (backward) backward_.emplace(s_, in);
  }

  void run(const Gpu& gpu) override {
    forward(gpu);
    if (backward_) backward(gpu, *backward_);
  }

  void result(std::string_view name, void* out) const override {
    auto* to = static_cast<bf16*>(out);
    const auto give = [&](const auto& tensor, const PackedOrders& order) {
      const auto from = tensor.matrix();
      using T = std::remove_cvref_t<decltype(*from.data)>;
      unpack<T, bf16>(from, order, {to, from.rows, from.cols});
    };
    if (name == "h2") return give(h2_, {});
    if (name == "qkv") return give(qkv_, {.cols = s_.heads()});
    if (!backward_) throw_no_output(name);
    const Backward& b = *backward_;
    if (name == "d_a") return give(b.d_a, {});
    if (name == "d_h0") return give(b.d_h1, {});
    if (name == "d_wo") return give(b.d_wo, {});
    if (name == "d_wd") return give(b.d_wd, {});
    if (name == "d_wgu") return give(b.mlp.d_weight, {.rows = s_.gate_up()});
    if (name == "d_wqkv") return give(b.attention.d_weight, {.rows = s_.heads()});
    if (name == "d_g2") return give(b.mlp.d_gamma, {});
    if (name == "d_g1") return give(b.attention.d_gamma, {});
    throw_no_output(name);
  }

 private:
  Matrix<float> row_slots(int64_t cols) const {
    return {partial_.matrix().data, detail::row_slot_count(cols), kTokens};
  }

  void forward(const Gpu& gpu) const {
    const Matrix<float> sum_sq = row_slots(s_.d);
    // F1
    gemm(gpu, a_, wo_, Residual<>{.residual = h0_, .gamma = {}, .h = h1_.matrix(), .x = {}, .sum_sq = sum_sq});
    inv_rms(gpu, sum_sq, s_.d, kEps, r1_.vector());
    // F2
    if (backward_)
      gemm(gpu, h1_.matrix(), wgu_.matrix(),
           RmsNormSwiGlu<>{.f = {}, .inv_rms = r1_.vector(), .gate_up = backward_->gate_up.matrix(), .y = y_.matrix()});
    else
      gemm(gpu, h1_.matrix(), wgu_.matrix(),
           RmsNormSwiGlu<Tensors<bf16>, DropGateUp>{.f = {}, .inv_rms = r1_.vector(), .gate_up = {}, .y = y_.matrix()});
    // F3
    gemm(gpu, y_.matrix(), wd_,
         Residual<>{.residual = h1_.matrix(), .gamma = {}, .h = h2_.matrix(), .x = {}, .sum_sq = sum_sq});
    inv_rms(gpu, sum_sq, s_.d, kEps, r2_.vector());
    // F4
    gemm(gpu, h2_.matrix(), wqkv_.matrix(),
         RmsNormRope<>{.inv_rms = r2_.vector(),
                       .position = rotation_.position.vector(),
                       .turns_high = rotation_.turns_high.vector(),
                       .turns_low = rotation_.turns_low.vector(),
                       .qkv = qkv_.matrix()});
  }

  void backward(const Gpu& gpu, const Backward& b) const {
    const Vector<float> mean_dot = b.mean_dot.vector();
    // B4
    const Matrix<float> dot_qkv = row_slots(s_.qkv);
    map(gpu, b.d_qkv.matrix(),
        RopeBackward<>{.inv_rms = r2_.vector(),
                       .position = rotation_.position.vector(),
                       .turns_high = rotation_.turns_high.vector(),
                       .turns_low = rotation_.turns_low.vector(),
                       .qkv = qkv_.matrix(),
                       .d_qkv = b.d_qkv_scaled.matrix(),
                       .dot = dot_qkv});
    coda::mean_dot(gpu, dot_qkv, s_.d, mean_dot);
    norm_backward(gpu, b.d_qkv_scaled, wqkv_, r2_, mean_dot, h2_.matrix(), b.d_h2, b.d_h2_all.matrix());
    b.attention.run(gpu, b.d_qkv_scaled.matrix(), h2_.matrix());
    // B3
    const Matrix<float> dot_z = row_slots(s_.ffn);
    gemm(gpu, b.d_h2_all.matrix(), transpose(wd_),
         SwiGluBackward<>{.f = {},
                          .inv_rms = r1_.vector(),
                          .gate_up = b.gate_up.matrix(),
                          .d_gate_up = b.d_gate_up.matrix(),
                          .y = y_.matrix(),
                          .dot_z = dot_z});
    coda::mean_dot(gpu, dot_z, s_.d, mean_dot);
    weight_gradient(gpu, b.d_h2_all.matrix(), y_.matrix(), b.d_wd);
    // B2
    norm_backward(gpu, b.d_gate_up, wgu_, r1_, mean_dot, h1_.matrix(), b.d_h2_all.matrix(), b.d_h1.matrix());
    b.mlp.run(gpu, b.d_gate_up.matrix(), h1_.matrix());
    // B1
    gemm(gpu, b.d_h1.matrix(), transpose(wo_), Store<>{.out = b.d_a.matrix()});
    weight_gradient(gpu, b.d_h1.matrix(), a_, b.d_wo);
  }
  static void norm_backward(const Gpu& gpu, const DeviceTensor<bf16>& d_y, const DeviceTensor<bf16>& weight,
                            const DeviceTensor<float>& inv_rms, Vector<float> mean_dot, Matrix<const bf16> h,
                            Matrix<const bf16> d_residual, Matrix<bf16> d_h) {
    gemm(gpu, d_y.matrix(), transpose(weight.matrix()),
         RmsNormBackward<>{.inv_rms = inv_rms.vector(),
                           .mean_dot = mean_dot,
                           .h = h,
                           .d_residual = d_residual,
                           .gamma = {},
                           .d_h = d_h,
                           .d_gamma = {}});
  }

  Shape s_;
  Matrix<const bf16> a_, h0_, wo_, wd_;
  DeviceTensor<bf16> wgu_, wqkv_;  // folded and packed
  Rotation rotation_;
  DeviceTensor<bf16> h1_, y_, h2_, qkv_;
  DeviceTensor<float> partial_, r1_, r2_;
  std::optional<Backward> backward_;
};

}  // namespace

std::unique_ptr<Case> make_block_case(std::string_view name, int64_t d, const Inputs& inputs) {
  const bool backward = name.ends_with(".fwd_bwd");
  if (name == "block.fwd" || name == "block.fwd_bwd")
    return std::make_unique<BlockCase>(block_shape(d), backward, inputs);
  if (name == "llama.fwd" || name == "llama.fwd_bwd")
    return std::make_unique<BlockCase>(llama_shape(d), backward, inputs);
  return nullptr;
}

}  // namespace coda::bench
