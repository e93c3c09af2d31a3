#include "check.h"

#include <fmt/format.h>

#include <cmath>

#include "coda/error.h"

namespace coda::detail {

namespace {

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

template <class A, class B>
bool share_memory(const Matrix<A>& a, const Matrix<B>& b) {
  if (a.rows == 0 || a.cols == 0 || b.rows == 0 || b.cols == 0) return false;
  const auto end = [](const auto& x) { return reinterpret_cast<const char*>(x.row(x.rows - 1) + x.cols); };
  return reinterpret_cast<const char*>(a.data) < end(b) && reinterpret_cast<const char*>(b.data) < end(a);
}

}  // namespace

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
}

void check_tokens(const TokenLosses& tokens, int64_t m) {
  check_optional("loss", tokens.loss, m);
  check_optional("z_loss", tokens.z_loss, m);
  check_optional("log_sum_exp", tokens.log_sum_exp, m);
}

void check_log_sum_exp(Vector<const float> log_sum_exp, int64_t m) {
  check_vector("log_sum_exp", log_sum_exp, m, "[M]");
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

#define CODA_LOSS_CHECKS(E)                                                                            \
  template void check_head(const LinearHead<E>&, const CrossEntropyOptions&);                          \
  template void check_gradients(const LinearHead<E>&, const CrossEntropyOptions&, Vector<const float>, \
                                const LinearHeadGradients<E>&);
CODA_LOSS_CHECKS(float)
CODA_LOSS_CHECKS(bf16)
#undef CODA_LOSS_CHECKS

}  // namespace coda::detail
