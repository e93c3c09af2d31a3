// Weights and norms as a PyTorch model keeps them, packed for a product in every call: a pass over a weight costs little beside a product
// of thousands of tokens, and nothing is kept that a sharded, frozen or updated parameter could disagree with.
#pragma once
#include <vector>

#include "coda/finish.h"
#include "coda/operands.h"
#include "coda/programs/store.h"
#include "engine.h"
#include "llama/layer.h"
#include "llama/packed_weight.h"

namespace coda::torch_ops {

using llama::PackedRows;

/// Whether a gradient is asked for: a bit each, in the order of the operator's parameters.
inline bool needs(int64_t mask, int bit) {
  return (mask >> bit & 1) != 0;
}

/// body(std::type_identity<T>{}) with the element type of a parameter. Throws OperandError.
template <class Body>
decltype(auto) with_element(const Tensor& parameter, const char* name, const Body& body) {
  if (parameter.scalar_type() == ScalarType::Float) return body(std::type_identity<float>{});
  if (parameter.scalar_type() == ScalarType::BFloat16) return body(std::type_identity<bf16>{});
  throw OperandError(name, "of another type", "float32 or bfloat16");
}

/// One of the matrices that a packed weight is made of.
struct Part {
  const char* name;
  Tensor plain;  // [N, K]
  PackedRows rows;
};

/// A weight as a product reads it: its parts packed, gamma folded into their columns. `gamma` may be without a value.
struct Weight {
  std::vector<Part> parts;
  std::optional<Tensor> gamma;  // [K]
  const char* gamma_name = "gamma";

  int64_t rows() const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += part.plain.size(0);
    return sum;
  }
  int64_t cols() const { return parts.front().plain.size(1); }
};

template <class Body>
void with_gamma(const Weight& weight, const Body& body) {
  if (!weight.gamma) return body(Vector<const float>{});
  with_element(*weight.gamma, weight.gamma_name, [&]<class G>(std::type_identity<G>) {
    const Vector<const G> gamma = vector<const G>(*weight.gamma, weight.gamma_name);
    if (gamma.size != weight.cols())
      throw OperandError(weight.gamma_name, std::to_string(gamma.size) + " values", std::to_string(weight.cols()));
    body(gamma);
  });
}

/// [rows, cols] in E, on the device of its parts. A single plain matrix of E is itself.
template <class E, class Engine>
Tensor packed(Engine& engine, const Weight& weight) {
  const Part& first = weight.parts.front();
  if (weight.parts.size() == 1 && !weight.gamma && first.rows.order == PackedRows::Order::plain &&
      first.plain.scalar_type() == kScalarType<E>)
    return first.plain;
  Tensor out = empty<E>(first.plain, {weight.rows(), weight.cols()});
  with_gamma(weight, [&]<class G>(const Vector<const G>& gamma) {
    for (const Part& part : weight.parts)
      with_element(part.plain, part.name, [&]<class W>(std::type_identity<W>) {
        llama::pack(engine, matrix<const W>(part.plain, part.name), part.rows, gamma, matrix<E>(out, "weight"));
      });
  });
  return out;
}

/// Gradients of parts and gamma, in their own types: empty where not asked for.
struct WeightGradients {
  std::vector<Tensor> parts;
  Tensor gamma;
};
inline Tensor not_asked(const Tensor& like) {
  return empty(like, {0}, like.scalar_type());
}

/// From d_outᵀ x, the gradient of the packed weight. needed: of each part, and of gamma last.
template <class E, class Engine>
WeightGradients weight_gradients(Engine& engine, const Weight& weight, const Matrix<const E>& d_out,
                                 const Matrix<const E>& x, const std::vector<bool>& needed) {
  WeightGradients gradients;
  const Part& only = weight.parts.front();
  // What needs no unpacking is stored as it will be: one rounding, no pass of its own.
  const bool in_float = only.plain.scalar_type() == ScalarType::Float;
  if (weight.parts.size() == 1 && !weight.gamma && only.rows.order == PackedRows::Order::plain &&
      (in_float || std::is_same_v<E, bf16>)) {
    Tensor d = not_asked(only.plain);
    if (needed.front()) {
      d = empty(only.plain, {weight.rows(), weight.cols()}, only.plain.scalar_type());
      const auto store = [&]<class P>(P program) { gemm_over_tokens(engine, transpose(d_out), transpose(x), program); };
      if constexpr (std::is_same_v<E, float>)
        store(Store<Tensors<float>>{.out = matrix<float>(d, only.name)});
      else if (in_float)
        store(Store<Tensors<E>, float>{.out = matrix<float>(d, only.name)});
      else
        store(Store<Tensors<E>>{.out = matrix<E>(d, only.name)});
    }
    return {{d}, not_asked(only.plain)};
  }
  bool any = false;
  for (const bool need : needed) any = any || need;
  const bool of_gamma = weight.gamma && needed.back();
  Tensor packed_gradient, slots;
  int64_t all_slots = 0;
  for (const Part& part : weight.parts) all_slots += llama::unpack_slots(part.plain.size(0));
  if (any) {
    packed_gradient = empty<float>(only.plain, {weight.rows(), weight.cols()});
    llama::weight_gradient<Engine, E>(engine, d_out, x, matrix<float>(packed_gradient, "gradient"), false);
  }
  if (of_gamma) slots = empty<float>(only.plain, {all_slots, weight.cols()});
  int64_t slot = 0;
  with_gamma(weight, [&]<class G>(const Vector<const G>& gamma) {
    for (size_t i = 0; i < weight.parts.size(); ++i) {
      const Part& part = weight.parts[i];
      const int64_t count = llama::unpack_slots(part.plain.size(0));
      with_element(part.plain, part.name, [&]<class W>(std::type_identity<W>) {
        Tensor d = needed[i] ? empty(part.plain, {part.plain.size(0), weight.cols()}, part.plain.scalar_type())
                             : not_asked(part.plain);
        if (needed[i] || of_gamma)
          llama::unpack_gradient(engine, matrix<const float>(packed_gradient, "gradient"), part.rows,
                                 matrix<const W>(part.plain, part.name), gamma,
                                 needed[i] ? matrix<W>(d, part.name) : Matrix<W>{},
                                 of_gamma ? matrix<float>(slots, "d_gamma").row_range(slot, count) : Matrix<float>{});
        gradients.parts.push_back(d);
      });
      slot += count;
    }
  });
  if (of_gamma) {
    Tensor sum = empty<float>(slots, {weight.cols()});
    total(engine, matrix<const float>(slots, "d_gamma"), vector<float>(sum, "d_gamma"));
    gradients.gamma =
        weight.gamma->scalar_type() == ScalarType::Float ? sum : torch::stable::to(sum, weight.gamma->scalar_type());
  } else {
    gradients.gamma = not_asked(weight.gamma ? *weight.gamma : only.plain);
  }
  return gradients;
}

/// A vector that a value for each of a product's columns is made of: a bias, or what repeats over n / size heads.
struct ColumnPart {
  const char* name;
  std::optional<Tensor> plain;  // [size]
  int64_t size;
  PackedRows rows;  // of the columns in the product
  int64_t n;        // columns
};

/// [width] in float. Columns of no part are not written. Throws OperandError for a part that is missing or of another size.
template <class Engine>
Tensor packed_columns(Engine& engine, const std::vector<ColumnPart>& parts, const Tensor& like, int64_t width) {
  Tensor out = empty<float>(like, {width});
  for (const ColumnPart& part : parts) {
    if (!part.plain || part.plain->numel() != part.size)
      throw OperandError(part.name, part.plain ? std::to_string(part.plain->numel()) + " values" : "missing",
                         std::to_string(part.size));
    with_element(*part.plain, part.name, [&]<class W>(std::type_identity<W>) {
      llama::pack_vector(engine, vector<const W>(*part.plain, part.name), part.rows, part.n,
                         vector<float>(out, "columns"));
    });
  }
  return out;
}

/// Gradients of the parts, in their own types, from the partial sums over rows, slots [⌈M/64⌉, width].
template <class Engine>
std::vector<Tensor> column_gradients(Engine& engine, const std::vector<ColumnPart>& parts, const Tensor& slots,
                                     const std::vector<bool>& needed) {
  const Tensor sum = empty<float>(slots, {slots.size(1)});
  total(engine, matrix<const float>(slots, "gradient"), vector<float>(sum, "gradient"));
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < parts.size(); ++i) {
    const ColumnPart& part = parts[i];
    const Tensor& plain = *part.plain;
    Tensor d = needed[i] ? empty(plain, {part.size}, plain.scalar_type()) : not_asked(plain);
    if (needed[i])
      with_element(plain, part.name, [&]<class W>(std::type_identity<W>) {
        llama::unpack_vector_gradient(engine, vector<const float>(sum, "gradient"), part.rows, part.n,
                                      vector<W>(d, part.name));
      });
    gradients.push_back(d);
  }
  return gradients;
}

}  // namespace coda::torch_ops
