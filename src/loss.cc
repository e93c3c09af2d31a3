#include "coda/loss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "buffer.h"
#include "coda/finish.h"
#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "operand_shape.h"

namespace coda {

namespace {

constexpr int64_t kLogitBytes = int64_t{64} << 20;

// ---- checks

void check_options(const CrossEntropyOptions& o) {
  if (!(o.label_smoothing >= 0 && o.label_smoothing <= 1))
    throw UsageError(fmt::format("label_smoothing is {}; it needs to be from 0 to 1", o.label_smoothing));
  if (!(o.z_loss >= 0 && std::isfinite(o.z_loss)))
    throw UsageError(fmt::format("z_loss is {}; it needs to be 0 or more", o.z_loss));
  if (o.softcap && !(*o.softcap > 0 && std::isfinite(*o.softcap)))
    throw UsageError(fmt::format("softcap is {}; it needs to be positive, or absent for no cap", *o.softcap));
  if (o.divisor && o.reduction != Reduction::mean)
    throw UsageError("a divisor is given, but only the reduction mean divides");
  if (o.divisor && !(*o.divisor > 0 && std::isfinite(*o.divisor)))
    throw UsageError(fmt::format("divisor is {}; it needs to be positive", *o.divisor));
}

template <class T>
void check_vector(const char* name, const Vector<T>& x, int64_t size, const char* formula) {
  if (x.size != size) throw OperandError(name, fmt::format("{} values", x.size), fmt::format("{} ({})", size, formula));
  if (size > 0 && x.data == nullptr) throw OperandError(name, "null", fmt::format("memory for {} values", size));
}
template <class T>
void check_optional(const char* name, const Vector<T>& x, int64_t m) {
  if (x.size != 0) check_vector(name, x, m, "[M], or none");
}
template <class T>
void check_shape(const char* name, const Matrix<T>& x, int64_t rows, int64_t cols, const char* formula) {
  if (x.rows != rows || x.cols != cols)
    throw OperandError(name, fmt::format("{}x{}", x.rows, x.cols), fmt::format("{}x{} ({})", rows, cols, formula));
}

template <class E>
void check_head(const LinearHead<E>& head, const CrossEntropyOptions& options) {
  check_options(options);
  const int64_t m = head.h.rows, vocab = head.weight.rows;
  if (head.weight.cols != head.h.cols)
    throw OperandError("weight", fmt::format("[V, K] = {}x{}", vocab, head.weight.cols),
                       fmt::format("the K = {} of h", head.h.cols));
  check_optional("inv_rms", head.inv_rms, m);
  check_optional("token_weight", head.token_weight, m);
  check_vector("label", head.label, m, "[M]");
  for (int64_t i = 0; i < m; ++i) {
    const int32_t label = head.label[i];
    if ((label < 0 || label >= vocab) && label != options.ignore_index)
      throw OperandError(fmt::format("label of row {}", i), fmt::format("{}", label),
                         fmt::format("an id from 0 to {}, or {} to be ignored", vocab - 1, options.ignore_index));
  }
}

void check_tokens(const TokenLosses& tokens, int64_t m) {
  check_optional("loss", tokens.loss, m);
  check_optional("z_loss", tokens.z_loss, m);
  check_optional("log_sum_exp", tokens.log_sum_exp, m);
}

template <class A, class B>
bool share_memory(const Matrix<A>& a, const Matrix<B>& b) {
  if (a.rows == 0 || a.cols == 0 || b.rows == 0 || b.cols == 0) return false;
  const auto end = [](const auto& x) { return reinterpret_cast<const char*>(x.row(x.rows - 1) + x.cols); };
  return reinterpret_cast<const char*>(a.data) < end(b) && reinterpret_cast<const char*>(b.data) < end(a);
}

template <class E>
void check_gradients(const LinearHead<E>& head, const CrossEntropyOptions& options, Vector<const float> d_loss,
                     const LinearHeadGradients<E>& gradients) {
  const int64_t m = head.h.rows, k = head.h.cols;
  if (options.reduction == Reduction::none)
    check_vector("d_loss", d_loss, m, "[M]: the reduction is none");
  else
    check_vector("d_loss", d_loss, 1, "one value: the reduction is sum or mean");
  check_shape("d_h", gradients.d_h, m, k, "[M, K]");
  check_shape("d_weight", gradients.d_weight, head.weight.rows, k, "[V, K]");
  const auto check_overlap = [](const char* name, const auto& written, const char* other_name, const auto& other) {
    // Not even exactly the same tensor: a chunk's h and all of weight are read again after the first d_h is written.
    if (share_memory(written, other))
      throw OverlapError(name, fmt::format("an output that shares memory with {}", other_name), "memory of its own");
  };
  check_overlap("d_h", gradients.d_h, "h", head.h);
  check_overlap("d_h", gradients.d_h, "weight", head.weight);
  check_overlap("d_weight", gradients.d_weight, "h", head.h);
  check_overlap("d_weight", gradients.d_weight, "weight", head.weight);
  check_overlap("d_weight", gradients.d_weight, "d_h", gradients.d_h);
}

// ---- one token's arithmetic

/// The loss of a token and its derivatives are functions of its row's statistics, in double.
class TokenLoss {
 public:
  template <class E>
  TokenLoss(const LinearHead<E>& head, const CrossEntropyOptions& options)
      : labels_(head.label),
        weights_(head.token_weight),
        ignored_(options.ignore_index),
        none_(options.reduction == Reduction::none),
        on_label_(1 - options.label_smoothing),
        on_each_(options.label_smoothing / static_cast<double>(head.weight.rows)),
        z_(options.z_loss),
        divisor_(1) {
    if (options.reduction != Reduction::mean) return;
    divisor_ = options.divisor.value_or(0);
    if (!options.divisor)
      for (int64_t i = 0; i < labels_.size; ++i)
        if (counts(i)) divisor_ += weight(i);
  }

  double divisor() const { return divisor_; }
  bool counts(int64_t token) const { return labels_[token] != ignored_; }
  double weight(int64_t token) const { return weights_.size == 0 ? 1 : static_cast<double>(weights_[token]); }

  double z_loss(int64_t token, double log_sum_exp) const { return weight(token) * z_ * log_sum_exp * log_sum_exp; }
  /// Without its z part.
  double cross_entropy(int64_t token, double log_sum_exp, double label_logit, double logit_sum) const {
    double loss = log_sum_exp - on_label_ * label_logit;
    if (on_each_ > 0) loss -= on_each_ * logit_sum;
    return weight(token) * loss;
  }

  /// dL/d(log-sum-exp), dL/d(label's logit), dL/d(sum of logits).
  struct Derivatives {
    float log_sum_exp = 0, label_logit = 0, logit_sum = 0;
  };
  Derivatives derivatives(int64_t token, double log_sum_exp, Vector<const float> d_loss) const {
    if (!counts(token)) return {};
    const double d = weight(token) * static_cast<double>(d_loss[none_ ? token : 0]) / divisor_;
    return {.log_sum_exp = static_cast<float>(d * (1 + 2 * z_ * log_sum_exp)),
            .label_logit = static_cast<float>(-d * on_label_),
            .logit_sum = static_cast<float>(-d * on_each_)};
  }

 private:
  Vector<const int32_t> labels_;
  Vector<const float> weights_;
  int32_t ignored_;
  bool none_;
  double on_label_, on_each_, z_, divisor_;
};

/// body(f, LogitSum{}) with the program options that belong to the caller's.
template <class Body>
void with_program_options(const CrossEntropyOptions& options, const Body& body) {
  const auto with_sum = [&](auto f) {
    if (options.label_smoothing > 0)
      body(f, WithLogitSum{});
    else
      body(f, WithoutLogitSum{});
  };
  if (options.softcap)
    with_sum(SoftCapped{static_cast<float>(*options.softcap)});
  else
    with_sum(Uncapped{});
}

}  // namespace

// ---- chunks

/// Memory of a chunk's logits and statistics.
template <class E>
struct LinearCrossEntropy<E>::Memory {
  int64_t vocab = 0, chunk = 0;
  Buffer<E> logits;                                         // [chunk, V]  once there is a gradient to make
  Buffer<float> maxima, partial;                            // [V/128, chunk]
  Buffer<float> logit_partial;                              // [V/128, chunk]
  Buffer<MaxSum> states;                                    // [V/128, chunk]
  Buffer<float> inv_rms;                                    // [chunk]  ones
  Buffer<float> log_sum_exp, label_logit, logit_sum;        // [chunk]
  Buffer<float> d_log_sum_exp, d_label_logit, d_logit_sum;  // [chunk]
  Buffer<float> mean_dot;                                   // [chunk]

  void reserve(int64_t vocab_, int64_t tokens, bool gradients) {
    const int64_t needed = chunk_tokens(vocab_, tokens);
    if (vocab != vocab_ || chunk < needed) {
      vocab = vocab_;
      chunk = needed;
      logits = {};
      for (Buffer<float>* partials : {&maxima, &partial, &logit_partial})
        *partials = {detail::row_slot_count(vocab), chunk};
      states = {detail::row_slot_count(vocab), chunk};
      for (Buffer<float>* row :
           {&inv_rms, &log_sum_exp, &label_logit, &logit_sum, &d_log_sum_exp, &d_label_logit, &d_logit_sum, &mean_dot})
        *row = {1, chunk};
      std::fill_n(inv_rms.matrix().data, chunk, 1.f);
    }
    if (gradients && logits.rows() == 0) logits = {chunk, vocab};
  }
};

namespace {

/// Tokens [first, first + count), and the views of the memory that belong to them.
template <class E, class Memory>
struct Chunk {
  Cpu& cpu;
  const LinearHead<E>& head;
  int64_t first, count;
  Matrix<const E> h;
  Vector<const float> inv_rms;
  Vector<const int32_t> label;
  Matrix<E> logits;
  Matrix<float> maxima, partial, logit_partial;
  Matrix<MaxSum> states;
  Vector<float> log_sum_exp, label_logit, logit_sum, d_log_sum_exp, d_label_logit, d_logit_sum, mean_dot;

  Chunk(Cpu& cpu_, const LinearHead<E>& head_, int64_t first_, Memory& memory)
      : cpu(cpu_), head(head_), first(first_), count(std::min(memory.chunk, head_.h.rows - first_)) {
    const int64_t n = detail::row_slot_count(head.weight.rows);
    h = head.h.row_range(first, count);
    inv_rms = head.inv_rms.size == 0 ? Vector<const float>(memory.inv_rms.vector(count))
                                     : Vector<const float>{head.inv_rms.data + first, count};
    label = {head.label.data + first, count};
    if (memory.logits.rows() > 0) logits = memory.logits.top(count);
    maxima = {memory.maxima.matrix().data, n, count};
    partial = {memory.partial.matrix().data, n, count};
    logit_partial = {memory.logit_partial.matrix().data, n, count};
    states = {memory.states.matrix().data, n, count};
    log_sum_exp = memory.log_sum_exp.vector(count);
    label_logit = memory.label_logit.vector(count);
    logit_sum = memory.logit_sum.vector(count);
    d_log_sum_exp = memory.d_log_sum_exp.vector(count);
    d_label_logit = memory.d_label_logit.vector(count);
    d_logit_sum = memory.d_logit_sum.vector(count);
    mean_dot = memory.mean_dot.vector(count);
  }

  /// F5
  template <class Keep>
  void statistics(const CrossEntropyOptions& options) {
    with_program_options(options, [&]<class Cap, class LogitSum>(Cap f, LogitSum) {
      CrossEntropy<Tensors<E>, Keep, Cap, LogitSum> program{
          .f = f, .inv_rms = inv_rms, .label = label, .log_sum_exp = states, .label_logit = partial};
      if constexpr (Keep::value) {
        program.maxima = maxima;
        program.relative_logits = logits;
      }
      if constexpr (LogitSum::value) program.logit_sum = logit_partial;
      gemm(cpu, h, head.weight, program);
      if constexpr (LogitSum::value) total(cpu, logit_partial, logit_sum);
    });
    coda::log_sum_exp(cpu, states, log_sum_exp);
    total(cpu, partial, label_logit);
  }

  void losses(const TokenLoss& token_loss, const CrossEntropyOptions& options, const TokenLosses& tokens,
              LossValue& value) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = first + i;
      const double lse = static_cast<double>(log_sum_exp[i]);
      double loss = 0, z = 0;
      if (token_loss.counts(token)) {
        const double sum = options.label_smoothing > 0 ? static_cast<double>(logit_sum[i]) : 0;
        z = options.z_loss > 0 ? token_loss.z_loss(token, lse) : 0;
        loss = token_loss.cross_entropy(token, lse, static_cast<double>(label_logit[i]), sum) + z;
      }
      value.sum += loss;
      value.z_sum += z;
      if (tokens.loss.size > 0) tokens.loss[token] = static_cast<float>(loss);
      if (tokens.z_loss.size > 0) tokens.z_loss[token] = static_cast<float>(z);
      if (tokens.log_sum_exp.size > 0) tokens.log_sum_exp[token] = log_sum_exp[i];
    }
  }

  /// B5, and the products of d_h and W. log_sum_exp is there; with KeepLogits so are the logits.
  template <class Keep>
  void gradients(const TokenLoss& token_loss, const CrossEntropyOptions& options, Vector<const float> d_loss,
                 const LinearHeadGradients<E>& gradients) {
    for (int64_t i = 0; i < count; ++i) {
      const auto d = token_loss.derivatives(first + i, static_cast<double>(log_sum_exp[i]), d_loss);
      d_log_sum_exp[i] = d.log_sum_exp;
      d_label_logit[i] = d.label_logit;
      d_logit_sum[i] = d.logit_sum;
    }
    with_program_options(options, [&]<class Cap, class LogitSum>(Cap f, LogitSum) {
      CrossEntropyBackward<Tensors<E>, Keep, Cap, LogitSum> program{.f = f,
                                                                    .inv_rms = inv_rms,
                                                                    .label = label,
                                                                    .log_sum_exp = log_sum_exp,
                                                                    .d_log_sum_exp = d_log_sum_exp,
                                                                    .d_label_logit = d_label_logit,
                                                                    .d_logits = logits,
                                                                    .dot = partial};
      if constexpr (LogitSum::value) program.d_logit_sum = d_logit_sum;
      if constexpr (Keep::value) {
        program.maxima = maxima;
        map(cpu, logits, program);
      } else {
        gemm(cpu, h, head.weight, program);
      }
    });
    const Matrix<E> d_h = gradients.d_h.row_range(first, count);
    if (head.inv_rms.size == 0) {
      gemm(cpu, logits, transpose(head.weight), Store<Tensors<E>>{.out = d_h});
    } else {
      coda::mean_dot(cpu, partial, head.h.cols, mean_dot);
      gemm(cpu, logits, transpose(head.weight),
           RmsNormBackward<Tensors<E>, StreamEnds>{.inv_rms = inv_rms, .mean_dot = mean_dot, .h = h, .d_h = d_h});
    }
    if (gradients.add || first > 0)
      gemm(cpu, transpose(logits), transpose(h), AccumulateInto<Tensors<float>>{.out = gradients.d_weight});
    else
      gemm(cpu, transpose(logits), transpose(h), Store<Tensors<float>>{.out = gradients.d_weight});
  }
};

/// body(chunk) for all chunks in order. One chunk of no tokens where there are none: the weight's gradient is written.
template <class E, class Memory, class Body>
void for_chunks(Cpu& cpu, const LinearHead<E>& head, Memory& memory, const Body& body) {
  int64_t first = 0;
  do {
    Chunk<E, Memory> chunk(cpu, head, first, memory);
    body(chunk);
    first += chunk.count;
  } while (first < head.h.rows);
}

}  // namespace

template <class E>
LinearCrossEntropy<E>::LinearCrossEntropy() : memory_(std::make_unique<Memory>()) {}
template <class E>
LinearCrossEntropy<E>::~LinearCrossEntropy() = default;
template <class E>
LinearCrossEntropy<E>::LinearCrossEntropy(LinearCrossEntropy&&) noexcept = default;
template <class E>
LinearCrossEntropy<E>& LinearCrossEntropy<E>::operator=(LinearCrossEntropy&&) noexcept = default;

template <class E>
int64_t LinearCrossEntropy<E>::chunk_tokens(int64_t vocab, int64_t tokens) {
  const int64_t row_bytes = std::max<int64_t>(1, vocab) * static_cast<int64_t>(sizeof(E));
  return std::clamp<int64_t>(kLogitBytes / row_bytes / 16 * 16, 16, std::max<int64_t>(16, tokens));
}

template <class E>
LossValue LinearCrossEntropy<E>::forward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                                         const TokenLosses& tokens) {
  check_head(head, options);
  check_tokens(tokens, head.h.rows);
  memory_->reserve(head.weight.rows, head.h.rows, false);
  const TokenLoss token_loss(head, options);
  LossValue value{.divisor = token_loss.divisor()};
  for_chunks(cpu, head, *memory_, [&](auto& chunk) {
    chunk.template statistics<RecomputeLogits>(options);
    chunk.losses(token_loss, options, tokens, value);
  });
  return value;
}

template <class E>
void LinearCrossEntropy<E>::backward(Cpu& cpu, const LinearHead<E>& head, const CrossEntropyOptions& options,
                                     Vector<const float> log_sum_exp, Vector<const float> d_loss,
                                     const LinearHeadGradients<E>& gradients) {
  check_head(head, options);
  check_vector("log_sum_exp", log_sum_exp, head.h.rows, "[M]");
  check_gradients(head, options, d_loss, gradients);
  memory_->reserve(head.weight.rows, head.h.rows, true);
  const TokenLoss token_loss(head, options);
  for_chunks(cpu, head, *memory_, [&](auto& chunk) {
    std::copy_n(log_sum_exp.data + chunk.first, chunk.count, chunk.log_sum_exp.data);
    chunk.template gradients<RecomputeLogits>(token_loss, options, d_loss, gradients);
  });
}

template <class E>
LossValue LinearCrossEntropy<E>::forward_backward(Cpu& cpu, const LinearHead<E>& head,
                                                  const CrossEntropyOptions& options, Vector<const float> d_loss,
                                                  const LinearHeadGradients<E>& gradients, const TokenLosses& tokens) {
  check_head(head, options);
  check_tokens(tokens, head.h.rows);
  check_gradients(head, options, d_loss, gradients);
  memory_->reserve(head.weight.rows, head.h.rows, true);
  const TokenLoss token_loss(head, options);
  LossValue value{.divisor = token_loss.divisor()};
  for_chunks(cpu, head, *memory_, [&](auto& chunk) {
    chunk.template statistics<KeepLogits>(options);
    chunk.losses(token_loss, options, tokens, value);
    chunk.template gradients<KeepLogits>(token_loss, options, d_loss, gradients);
  });
  return value;
}

template class LinearCrossEntropy<float>;
template class LinearCrossEntropy<bf16>;

}  // namespace coda
