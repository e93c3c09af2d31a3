// Operators of single products, for models that are put together otherwise.
#include "glu.h"
#include "llama/layer_rows.h"
#include "norm.h"
#include "operators.h"
#include "weight.h"

namespace coda::torch_ops {

namespace {

using Order = PackedRows::Order;

Weight gate_up_weight(const Tensor& w_gate, const Tensor& w_up, const std::optional<Tensor>& gamma) {
  return {{{"w_gate", w_gate, {.order = Order::gate}}, {"w_up", w_up, {.order = Order::up}}}, gamma, "gamma"};
}

template <class E, class Engine>
Tensor product_with_transposed(Engine& engine, const Tensor& d_out, const Tensor& w, const Tensor& like) {
  Tensor d_x = empty<E>(like, {d_out.size(0), w.size(1)});
  gemm(engine, matrix<const E>(d_out, "the upstream gradient"), transpose(matrix<const E>(w, "weight")),
       Store<Tensors<E>>{.out = matrix<E>(d_x, "d_x")});
  return d_x;
}

}  // namespace

Tensors3 norm_linear_glu(Tensor h, std::optional<Tensor> gamma, Tensor w_gate, Tensor w_up, int64_t glu, double limit,
                         double alpha, double eps, bool keep) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = h.size(0), f = w_gate.size(0);
    const Tensor inv_rms = gamma ? inv_rms_of<Engine, E>(engine, h, eps)
                                 : torch::stable::full(torch::headeronly::IntHeaderOnlyArrayRef(&m, 1), 1.0,
                                                       ScalarType::Float, std::nullopt, h.device());
    Tensor y = empty<E>(h, {m, f}), gate_up = empty<E>(h, {keep ? m : 0, 2 * f});
    const Tensor w = packed<E>(engine, gate_up_weight(w_gate, w_up, gamma));
    with_glu(glu, limit, alpha, [&]<class Function>(Function function) {
      const auto run = [&](auto program) {
        gemm(engine, matrix<const E>(h, "h"), matrix<const E>(w, "weight"), program);
      };
      const Vector<const float> r = vector<const float>(inv_rms, "inv_rms");
      if (!keep)
        return run(RmsNormGlu<Tensors<E>, Function, DropGateUp>{.f = function, .inv_rms = r, .y = matrix<E>(y, "y")});
      run(RmsNormGlu<Tensors<E>, Function>{
          .f = function, .inv_rms = r, .gate_up = matrix<E>(gate_up, "gate_up"), .y = matrix<E>(y, "y")});
    });
    return Tensors3{y, gate_up, inv_rms};
  });
}

Tensors4 norm_linear_glu_backward(Tensor d_y, Tensor h, Tensor gate_up, Tensor inv_rms, std::optional<Tensor> gamma,
                                  Tensor w_gate, Tensor w_up, int64_t glu, double limit, double alpha, int64_t mask) {
  return on_engine(h, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = h.size(0), d = h.size(1), f = w_gate.size(0);
    const Weight weight = gate_up_weight(w_gate, w_up, gamma);
    const Tensor d_gate_up = empty<E>(h, {m, 2 * f}), y = empty<E>(h, {m, f}),
                 partial = empty<float>(h, {coda::detail::row_slot_count(f), m}),
                 mean_dot_of_rows = empty<float>(h, {m});
    const Vector<const float> r = vector<const float>(inv_rms, "inv_rms");
    const Matrix<float> dot = matrix<float>(partial, "partial");
    with_glu(glu, limit, alpha, [&]<class Function>(Function function) {
      map(engine, matrix<const E>(d_y, "d_y"),
          GluBackward<Tensors<E>, Function>{.f = function,
                                            .inv_rms = r,
                                            .gate_up = matrix<const E>(gate_up, "gate_up"),
                                            .d_gate_up = matrix<E>(d_gate_up, "d_gate_up"),
                                            .y = matrix<E>(y, "y"),
                                            .dot_z = dot});
    });
    const Tensor w = packed<E>(engine, weight);
    Tensor d_h = empty<E>(h, {m, d});
    if (gamma) {
      llama::normed_product_backward<Engine, E>(engine, matrix<const E>(w, "weight"), {matrix<const E>(h, "h"), r}, dot,
                                                vector<float>(mean_dot_of_rows, "mean_dot"),
                                                matrix<const E>(d_gate_up, "d_gate_up"), {}, matrix<E>(d_h, "d_h"));
    } else {
      d_h = product_with_transposed<E>(engine, d_gate_up, w, h);
    }
    const WeightGradients gradients =
        weight_gradients<E>(engine, weight, matrix<const E>(d_gate_up, "d_gate_up"), matrix<const E>(h, "h"),
                            {needs(mask, 1), needs(mask, 2), needs(mask, 0)});
    return Tensors4{d_h, gradients.gamma, gradients.parts[0], gradients.parts[1]};
  });
}

Tensor linear(Tensor x, Tensor weight) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    Tensor out = empty<E>(x, {x.size(0), weight.size(0)});
    const Tensor w = packed<E>(engine, Weight{{{"weight", weight, {}}}, std::nullopt});
    gemm(engine, matrix<const E>(x, "x"), matrix<const E>(w, "weight"),
         Store<Tensors<E>>{.out = matrix<E>(out, "out")});
    return out;
  });
}

Tensor linear_residual(Tensor x, Tensor weight, Tensor residual) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    const int64_t m = x.size(0), n = weight.size(0);
    Tensor h = empty<E>(x, {m, n});
    const Tensor w = packed<E>(engine, Weight{{{"weight", weight, {}}}, std::nullopt});
    const Tensor partial = empty<float>(x, {coda::detail::row_slot_count(n), m});
    gemm(engine, matrix<const E>(x, "x"), matrix<const E>(w, "weight"),
         Residual<Tensors<E>>{.residual = matrix<const E>(residual, "residual"),
                              .h = matrix<E>(h, "h"),
                              .sum_sq = matrix<float>(partial, "partial")});
    return h;
  });
}

Tensors2 linear_residual_backward(Tensor d_h, Tensor x, Tensor weight, int64_t mask) {
  return on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    const Weight of{{{"weight", weight, {}}}, std::nullopt};
    const Tensor w = packed<E>(engine, of);
    Tensor d_x = product_with_transposed<E>(engine, d_h, w, x);
    return Tensors2{
        d_x, weight_gradients<E>(engine, of, matrix<const E>(d_h, "d_h"), matrix<const E>(x, "x"), {needs(mask, 0)})
                 .parts[0]};
  });
}

Tensor scaled_to_bf16(Tensor x, Tensor scale) {
  Tensor out = empty<bf16>(x, {x.size(0), x.size(1)});
  on_engine(out, [&]<class Engine, class>(Engine& engine) {
    with_element(x, "x", [&]<class W>(std::type_identity<W>) {
      llama::pack(engine, matrix<const W>(x, "x"), {}, vector<const float>(scale, "scale"), matrix<bf16>(out, "out"));
    });
  });
  return out;
}

void accumulate_weight_gradient_(Tensor main_grad, Tensor d_out, Tensor x) {
  on_engine(x, [&]<class Engine, class E>(Engine& engine) {
    gemm_over_tokens(engine, transpose(matrix<const E>(d_out, "d_out")), transpose(matrix<const E>(x, "x")),
                     AccumulateInto<Tensors<E>>{.out = matrix<float>(main_grad, "main_grad")});
  });
}

}  // namespace coda::torch_ops
