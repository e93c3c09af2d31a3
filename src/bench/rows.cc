#include "rows.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "buffer.h"
#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "operand_shape.h"

namespace coda::bench {

namespace {

using detail::row_slot_count;

template <class T>
Buffer<T> random_buffer(int64_t rows, int64_t cols, std::mt19937_64& random) {
  Buffer<T> buffer(rows, cols);
  std::normal_distribution<float> normal(0, 0.05f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) buffer.matrix()(i, j) = static_cast<T>(normal(random));
  return buffer;
}

template <class E>
Buffer<float> floats_of(Buffer<E>& values) {
  Buffer<float> copy(values.rows(), values.cols());
  std::ranges::transform(values.span(), copy.span().begin(), [](E x) { return static_cast<float>(x); });
  return copy;
}

/// The values themselves where they are floats.
template <class E>
const float* floats(Buffer<E>& values, Buffer<float>& copy) {
  if constexpr (std::is_same_v<E, float>)
    return values.matrix().data;
  else
    return copy.matrix().data;
}

template <class E>
class BlockOf : public Block {
 public:
  BlockOf(Cpu& cpu, const Shape& shape) : cpu_(cpu) {
    const int64_t m = shape.tokens, d = shape.hidden, f = shape.ffn, head = d / shape.heads;
    const int64_t qkv = d + 2 * shape.kv_heads * head, v = shape.vocab;
    const int64_t widest = std::max({2 * f, qkv, d, v});
    std::mt19937_64 random(1);
    // Every tensor has the largest size that any row needs of it: a row takes a packed view of the beginning.
    a_ = random_buffer<E>(m, widest, random);
    b_ = random_buffer<E>(widest, std::max(m, d), random);
    x_ = random_buffer<E>(m, 2 * widest, random);
    residual_ = random_buffer<E>(m, d, random);
    out_ = Buffer<E>(m, 2 * widest);
    half_ = Buffer<E>(m, widest);
    gradient_ = Buffer<float>(widest, std::max(f, d));
    if constexpr (!std::is_same_v<E, float>) {
      plain_a_ = floats_of(a_);
      plain_b_ = floats_of(b_);
    }
    plain_out_ = Buffer<float>(std::max(m, widest), std::max(widest, f));
    partial_ = Buffer<float>(row_slot_count(widest), m);
    maxima_ = Buffer<float>(row_slot_count(widest), m);
    states_ = Buffer<MaxSum>(row_slot_count(widest), m);
    scale_ = Buffer<float>(1, m);
    turns_ = Buffer<float>(1, qkv / 2);
    position_ = Buffer<int32_t>(1, m);
    for (int64_t i = 0; i < m; ++i) {
      scale_.matrix()(0, i) = 1;
      position_.matrix()(0, i) = static_cast<int32_t>(i);
    }
    for (int64_t i = 0; i < qkv / 2; ++i) turns_.matrix()(0, i) = 0.1f / static_cast<float>(1 + i % (head / 2));
    const Vector<const float> r = scale_.vector(m), turns = turns_.vector(qkv / 2);
    const Vector<const int32_t> position = position_.vector(m);
    using S = Tensors<E>;

    const Residual<S> residual{.residual = residual_.matrix(), .h = out(m, d), .sum_sq = partial(m, d)};
    add("F1 attention's output", "Residual", Form::TN, m, d, d, residual);
    add("F2 gate and up", "RmsNormSwiGlu", Form::TN, m, 2 * f, d,
        RmsNormSwiGlu<S>{.inv_rms = r, .gate_up = out(m, 2 * f), .y = half(m, f)});
    add("F3 down", "Residual", Form::TN, m, d, f, residual);
    add("F4 q, k and v", "RmsNormRope", Form::TN, m, qkv, d,
        RmsNormRope<S>{
            .inv_rms = r, .position = position, .turns_high = turns, .turns_low = turns, .qkv = out(m, qkv)});
    if (v > 0)
      add("F5 logits", "CrossEntropy", Form::TN, m, v, d,
          CrossEntropy<S>{.inv_rms = r,
                          .label = position,
                          .maxima = slots_of(maxima_, m, v),
                          .relative_logits = out(m, v),
                          .log_sum_exp = {states_.matrix().data, row_slot_count(v), m},
                          .label_logit = partial(m, v)},
          {.in_block = false});

    const auto norm_backward = [&] {
      return RmsNormBackward<S>{
          .inv_rms = r, .mean_dot = r, .h = x(m, d), .d_residual = residual_.matrix(), .d_h = out(m, d)};
    };
    const RowOptions backward{.backward = true};
    add("B3 down", "SwiGluBackward", Form::NN, m, f, d,
        SwiGluBackward<S>{
            .inv_rms = r, .gate_up = x(m, 2 * f), .d_gate_up = out(m, 2 * f), .y = half(m, f), .dot_z = partial(m, f)},
        backward);
    add_weight_gradient("W down", d, f, m);
    add("B2 gate and up", "RmsNormBackward", Form::NN, m, d, 2 * f, norm_backward(), backward);
    add_weight_gradient("W gate and up", 2 * f, d, m);
    add("B1 attention's output", "Store", Form::NN, m, d, d, Store<S>{.out = out(m, d)}, backward);
    add_weight_gradient("W attention's output", d, d, m);
    rows_.push_back({.name = "B4 rotation back",
                     .program = "RopeBackward",
                     .form = Form::NN,
                     .m = m,
                     .n = qkv,
                     .k = 0,
                     .backward = true,
                     .in_block = true,
                     .fused =
                         [this, program = RopeBackward<S>{.inv_rms = r,
                                                          .position = position,
                                                          .turns_high = turns,
                                                          .turns_low = turns,
                                                          .qkv = x(m, qkv),
                                                          .d_qkv = out(m, qkv),
                                                          .dot = partial(m, qkv)}] {
                           map(cpu_, Matrix<const E>(a_.matrix().data, program.qkv.rows, program.qkv.cols), program);
                         },
                     .plain = nullptr,
                     .pass = nullptr});
    rows_.back().pass = rows_.back().fused;
    add("B4 q, k and v", "RmsNormBackward", Form::NN, m, d, qkv, norm_backward(), backward);
    add_weight_gradient("W q, k and v", qkv, d, m);
  }

  double difference(const Row& row, Library& library) override {
    const auto run = [&](const std::function<void()>& body) {
      for (auto* buffer : {&out_, &half_}) std::ranges::fill(buffer->span(), E(0.f));
      for (auto* buffer : {&gradient_, &partial_}) std::ranges::fill(buffer->span(), 0.f);
      body();
      std::vector<float> outputs;
      for (auto* buffer : {&out_, &half_})
        for (E x : buffer->span()) outputs.push_back(static_cast<float>(x));
      for (auto* buffer : {&gradient_, &partial_})
        outputs.insert(outputs.end(), buffer->span().begin(), buffer->span().end());
      return outputs;
    };
    const std::vector<float> ours = run(row.fused);
    const std::vector<float> theirs = run([&] {
      row.plain(library);
      if (row.pass)
        row.pass();
      else
        std::copy_n(plain_out_.matrix().data, row.m * row.n, gradient_.matrix().data);
    });
    double largest = 0, apart = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(theirs[i])));
      const double gap = std::fabs(static_cast<double>(ours[i]) - static_cast<double>(theirs[i]));
      if (std::isnan(gap)) return gap;  // a maximum would pass over it
      apart = std::max(apart, gap);
    }
    return apart / largest;
  }

 private:
  struct RowOptions {
    bool backward = false;
    bool in_block = true;
  };

  Matrix<E> out(int64_t rows, int64_t cols) { return {out_.matrix().data, rows, cols}; }
  Matrix<E> half(int64_t rows, int64_t cols) { return {half_.matrix().data, rows, cols}; }
  Matrix<const E> x(int64_t rows, int64_t cols) { return {x_.matrix().data, rows, cols}; }
  static Matrix<float> slots_of(Buffer<float>& buffer, int64_t rows, int64_t cols) {
    return {buffer.matrix().data, row_slot_count(cols), rows};
  }
  Matrix<float> partial(int64_t rows, int64_t cols) { return slots_of(partial_, rows, cols); }

  template <class P>
  void add(const std::string& name, const std::string& program_name, Form form, int64_t m, int64_t n, int64_t k,
           const P& program, RowOptions options = {}) {
    const E *a = a_.matrix().data, *b = b_.matrix().data;
    std::function<void()> fused;
    if (form == Form::TN)
      fused = [=, this] { gemm(cpu_, Matrix<const E>(a, m, k), Matrix<const E>(b, n, k), program); };
    else if (form == Form::NN)
      fused = [=, this] { gemm(cpu_, Matrix<const E>(a, m, k), transpose(Matrix<const E>(b, k, n)), program); };
    else
      fused = [=, this] {
        gemm(cpu_, transpose(Matrix<const E>(a, k, m)), transpose(Matrix<const E>(b, k, n)), program);
      };
    const Product product{form, m, n, k, floats(a_, plain_a_), floats(b_, plain_b_), plain_out_.matrix().data};
    rows_.push_back({.name = name,
                     .program = program_name,
                     .form = form,
                     .m = m,
                     .n = n,
                     .k = k,
                     .backward = options.backward,
                     .in_block = options.in_block,
                     .fused = std::move(fused),
                     .plain = [product](Library& library) { library(product); },
                     .pass = [=, this] { map(cpu_, Matrix<const float>(product.out, m, n), program); }});
  }
  void add_weight_gradient(const std::string& name, int64_t rows, int64_t cols, int64_t tokens) {
    add(name, "Store", Form::NT, rows, cols, tokens,
        Store<Tensors<float>>{.out = {gradient_.matrix().data, rows, cols}}, {.backward = true});
    rows_.back().pass = nullptr;  // the library stores it where it belongs
  }

  Cpu& cpu_;
  Buffer<E> a_, b_, x_, residual_, out_, half_;
  Buffer<float> gradient_, plain_a_, plain_b_, plain_out_, partial_, maxima_, scale_, turns_;
  Buffer<MaxSum> states_;
  Buffer<int32_t> position_;
};

}  // namespace

std::unique_ptr<Block> make_block(Cpu& cpu, const Shape& shape, llama::Dtype dtype) {
  if (dtype == llama::Dtype::bf16) return std::make_unique<BlockOf<bf16>>(cpu, shape);
  return std::make_unique<BlockOf<float>>(cpu, shape);
}

}  // namespace coda::bench
