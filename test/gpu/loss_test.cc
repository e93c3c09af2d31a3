// The vocabulary loss on the GPU against its definition in double, from the same bf16 inputs; tokens and columns at the edge
// of tiles and chunks, CUDA graphs, labels that are no ids. Needs a GPU of compute capability 9.0; not part of `make test`.
// Prints "passed" last, or exits with 1.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coda/gpu.h"
#include "coda/loss.h"
#include "loss_reference.h"

namespace coda::test {
namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}
void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

/// Memory of the device, full of NaN, kept until the process ends.
template <class T>
class Device {
 public:
  explicit Device(int64_t size) : size_(size) {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes() + 16));
    data_ = static_cast<T*>(p);
    poison();
  }
  explicit Device(const std::vector<T>& values) : Device(static_cast<int64_t>(values.size())) { set(values); }

  T* data() const { return data_; }
  Vector<T> vector() const { return {data_, size_}; }
  void poison() const { check(cudaMemset(data_, 0xff, bytes())); }
  void set(const std::vector<T>& values) const {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    check(cudaDeviceSynchronize());
    std::vector<T> values(static_cast<size_t>(size_));
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(T); }
  T* data_;
  int64_t size_;
};

std::vector<bf16> normal_numbers(int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<bf16> values(static_cast<size_t>(count));
  for (bf16& x : values) x = bf16(normal(random));
  return values;
}

struct Result {
  std::vector<float> loss, z_loss, log_sum_exp, d_weight;
  std::vector<bf16> d_h;
  LossValue value;

  bool operator==(const Result& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(loss, other.loss) && same(z_loss, other.z_loss) && same(log_sum_exp, other.log_sum_exp) &&
           same(d_weight, other.d_weight) && same(d_h, other.d_h) &&
           std::memcmp(&value, &other.value, sizeof value) == 0;
  }
};

/// A head with its operands on both sides, and its outputs.
struct Problem {
  int64_t m, vocab, k;
  std::mt19937 random{11};
  std::vector<bf16> host_h, host_w;
  std::vector<float> host_inv_rms, host_token_weight;
  std::vector<int32_t> host_label;
  Device<bf16> h, w;
  Device<float> inv_rms, token_weight;
  Device<int32_t> label;
  Device<float> loss, z_loss, log_sum_exp, d_weight;
  Device<bf16> d_h;
  Device<LossValue> value{1};

  /// deviation: of the logits.
  Problem(int64_t m_, int64_t vocab_, int64_t k_, float deviation)
      : m(m_),
        vocab(vocab_),
        k(k_),
        host_h(normal_numbers(m * k, 1, random)),
        host_w(normal_numbers(vocab * k, deviation / std::sqrt(static_cast<float>(k)), random)),
        host_inv_rms(inv_rms_of(host_h, k)),
        host_token_weight(weights(m)),
        host_label(labels()),
        h(host_h),
        w(host_w),
        inv_rms(host_inv_rms),
        token_weight(host_token_weight),
        label(host_label),
        loss(m),
        z_loss(m),
        log_sum_exp(m),
        d_weight(vocab * k),
        d_h(m * k) {}

  static std::vector<float> inv_rms_of(const std::vector<bf16>& h, int64_t k) {
    std::vector<float> out;
    for (size_t i = 0; i < h.size(); i += static_cast<size_t>(k)) {
      double sum = 0;
      for (size_t j = i; j < i + static_cast<size_t>(k); ++j)
        sum += static_cast<double>(h[j]) * static_cast<double>(h[j]);
      out.push_back(static_cast<float>(1 / std::sqrt(sum / static_cast<double>(k) + 1e-6)));
    }
    return out;
  }
  static std::vector<float> weights(int64_t m) {
    std::vector<float> out;
    for (int64_t i = 0; i < m; ++i) out.push_back(0.25f * static_cast<float>(1 + i % 5));
    return out;
  }
  std::vector<int32_t> labels() {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < m; ++i)
      out.push_back(i % 7 == 3 ? kIgnoreIndex : static_cast<int32_t>(random() % static_cast<unsigned>(vocab)));
    out.front() = static_cast<int32_t>(vocab - 1);
    return out;
  }

  LinearHead<bf16> head(bool norm = true, bool weighted = false) const {
    LinearHead<bf16> head{.h = {h.data(), m, k},
                          .inv_rms = {},
                          .weight = {w.data(), vocab, k},
                          .label = {label.data(), m},
                          .token_weight = {}};
    if (norm) head.inv_rms = inv_rms.vector();
    if (weighted) head.token_weight = token_weight.vector();
    return head;
  }
  reference::Head definition(bool norm, bool weighted) const {
    reference::Head head{m,          vocab, k,   {host_h.begin(), host_h.end()}, {host_w.begin(), host_w.end()},
                         host_label, {},    norm};
    if (weighted) head.token_weight.assign(host_token_weight.begin(), host_token_weight.end());
    return head;
  }
  TokenLosses tokens() const {
    return {.loss = loss.vector(), .z_loss = z_loss.vector(), .log_sum_exp = log_sum_exp.vector()};
  }
  LinearHeadGradients<bf16> gradients(bool add = false) const {
    return {.d_h = {d_h.data(), m, k}, .d_weight = {d_weight.data(), vocab, k}, .add = add};
  }
  void poison() const {
    for (const Device<float>* x : {&loss, &z_loss, &log_sum_exp, &d_weight}) x->poison();
    d_h.poison();
    value.poison();
  }
  Result result() const {
    return {.loss = loss.get(),
            .z_loss = z_loss.get(),
            .log_sum_exp = log_sum_exp.get(),
            .d_weight = d_weight.get(),
            .d_h = d_h.get(),
            .value = value.get()[0]};
  }
};

/// A Gpu with as much workspace as a call says that it needs.
Gpu with_workspace(const GpuLinearCrossEntropy& loss, const Problem& p, const LinearHead<bf16>& head,
                   const CrossEntropyOptions& options) {
  Gpu gpu;
  if (const int64_t bytes = loss.workspace(head, options, p.gradients()); bytes > 0)
    gpu.set_workspace(Device<char>(bytes).data(), bytes);
  return gpu;
}

double frobenius(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}
template <class T>
double relative_error(const std::vector<T>& got, const std::vector<double>& want) {
  std::vector<double> gap;
  for (size_t i = 0; i < want.size(); ++i) gap.push_back(static_cast<double>(got[i]) - want[i]);
  const double size = frobenius(want);
  return size > 0 ? frobenius(gap) / size : frobenius(gap);
}

/// slack: how many times the error of the path in bf16.
template <class T>
void expect_near(const std::string& what, const std::vector<T>& got, const std::vector<double>& want,
                 const std::vector<double>& bf16_path, int64_t cols, double slack) {
  const double error = relative_error(got, want), path = relative_error(bf16_path, want);
  size_t worst = 0;
  double gap = -1;
  for (size_t i = 0; i < want.size(); ++i)
    if (const double g = std::fabs(static_cast<double>(got[i]) - want[i]); !(g <= gap)) gap = g, worst = i;
  std::printf("  %-24s %.2e, a path in bf16 %.2e; worst at row %zu, column %zu: %.6g, needs %.6g\n", what.c_str(),
              error, path, worst / static_cast<size_t>(cols), worst % static_cast<size_t>(cols),
              static_cast<double>(got[worst]), want[worst]);
  expect(error <= slack * path + 1e-6, what);
}

constexpr double kNoWorse = 1;
// A kept logit is relative to the maximum of its group: a larger number than itself, more roughly rounded, where no logit
// stands out. A loss takes the label's; the slope of a cap takes each.
constexpr double kKeptLosses = 4, kKeptUnderCap = 2.5;

void expect_definition(const Problem& p, const CrossEntropyOptions& options, bool norm = true, bool weighted = false,
                       int64_t chunk_tokens = 128) {
  std::printf("%ld tokens, vocabulary %ld, %ld wide; reduction %d, smoothing %g, z-loss %g, cap %g%s%s\n",
              static_cast<long>(p.m), static_cast<long>(p.vocab), static_cast<long>(p.k),
              static_cast<int>(options.reduction), options.label_smoothing, options.z_loss, options.softcap.value_or(0),
              norm ? ", norm in front" : "", weighted ? ", weights" : "");
  std::vector<float> d_loss{0.75f};
  if (options.reduction == Reduction::none) {
    d_loss.clear();
    for (int64_t i = 0; i < p.m; ++i) d_loss.push_back(0.5f - 0.125f * static_cast<float>(i % 9));
  }
  const Device<float> upstream(d_loss);
  const auto want = losses(p.definition(norm, weighted), options, {d_loss.begin(), d_loss.end()});
  const auto path = losses(p.definition(norm, weighted), options, {d_loss.begin(), d_loss.end()}, reference::InBf16{});

  const LinearHead<bf16> head = p.head(norm, weighted);
  GpuLinearCrossEntropy loss(Gpu{}, {.tokens = p.m + 5, .vocab = p.vocab, .chunk_tokens = chunk_tokens});
  const Gpu gpu = with_workspace(loss, p, head, options);
  const auto check_losses = [&](const std::string& name, const Result& got, double slack) {
    expect_near(name + " loss", got.loss, want.loss, path.loss, 1, slack);
    expect_near(name + " z_loss", got.z_loss, want.z_loss, path.z_loss, 1, slack);
    expect_near(name + " log_sum_exp", got.log_sum_exp, want.log_sum_exp, path.log_sum_exp, 1, slack);
    double sum = 0, z_sum = 0;
    for (size_t i = 0; i < got.loss.size(); ++i) {
      sum += static_cast<double>(got.loss[i]);
      z_sum += static_cast<double>(got.z_loss[i]);
    }
    expect(std::fabs(got.value.sum - sum) <= 1e-6 * std::fabs(sum), name + " sum");
    expect(std::fabs(got.value.z_sum - z_sum) <= 1e-6 * z_sum, name + " z_sum");
    expect(std::fabs(got.value.value() - want.value) <= 2e-3 * std::fabs(want.value),
           name + " value is " + std::to_string(got.value.value()) + ", needs " + std::to_string(want.value));
  };
  const auto check_gradients = [&](const std::string& name, const Result& got, double slack) {
    expect_near(name + " d_h", got.d_h, want.d_h, path.d_h, p.k, slack);
    expect_near(name + " d_weight", got.d_weight, want.d_weight, path.d_weight, p.k, slack);
  };

  p.poison();
  loss.forward_backward(gpu, head, options, upstream.vector(), p.gradients(), p.value.data(), p.tokens());
  const Result both = p.result();
  check_losses("both", both, kKeptLosses);
  check_gradients("both", both, options.softcap ? kKeptUnderCap : kNoWorse);
  p.poison();
  loss.forward_backward(gpu, head, options, upstream.vector(), p.gradients(), p.value.data(), p.tokens());
  expect(p.result() == both, "a call that is repeated gives other bits");

  p.poison();
  loss.forward(gpu, head, options, p.value.data(), p.tokens());
  check_losses("forward", p.result(), kNoWorse);
  p.d_h.poison();
  p.d_weight.poison();
  loss.backward(gpu, head, options, p.log_sum_exp.vector(), upstream.vector(), p.gradients());
  check_gradients("backward", p.result(), kNoWorse);

  // Twice the gradient where it is added to itself; chunks of another size give losses of the same bits.
  loss.backward(gpu, head, options, p.log_sum_exp.vector(), upstream.vector(), p.gradients(true));
  auto twice = want.d_weight, path_twice = path.d_weight;
  for (double& x : twice) x *= 2;
  for (double& x : path_twice) x *= 2;
  expect_near("added d_weight", p.result().d_weight, twice, path_twice, p.k, kNoWorse);
  GpuLinearCrossEntropy whole(Gpu{}, {.tokens = p.m, .vocab = p.vocab});
  p.poison();
  whole.forward_backward(with_workspace(whole, p, head, options), head, options, upstream.vector(), p.gradients(),
                         p.value.data(), p.tokens());
  Result again = p.result();
  again.d_weight = both.d_weight;
  expect(again == both, "one chunk gives other bits");
}

void every_option() {
  const Problem p(300, 1000, 64, 2);
  expect_definition(p, {});
  expect_definition(p, {.divisor = 311}, false);
  expect_definition(p, {.reduction = Reduction::none});
  expect_definition(p, {.reduction = Reduction::none, .label_smoothing = 0.1, .softcap = 2}, false, true);
  expect_definition(p, {.label_smoothing = 0.2}, true, true);
  expect_definition(p, {.reduction = Reduction::sum, .z_loss = 0.01}, false);
  expect_definition(p, {.softcap = 1.5}, true);
  Problem q(300, 1000, 64, 2);
  for (int32_t& label : q.host_label)
    if (label == kIgnoreIndex) label = 7;
  q.label.set(q.host_label);
  expect_definition(q, {.divisor = 100, .ignore_index = 7, .label_smoothing = 0.3, .z_loss = 0.1, .softcap = 1}, true,
                    true);
}

void edges() {
  expect_definition({37, 304, 64, 2}, {.divisor = 31});
  expect_definition({1, 256, 128, 2}, {.reduction = Reduction::sum});
  expect_definition({130, 1003, 72, 2}, {});                     // rows of logits that TMA cannot write
  expect_definition({65, 5, 20, 2}, {}, false);                  // rows of h and weight that it cannot read
  expect_definition({1000, 2000, 64, 6}, {}, true, false, 256);  // confident tokens
}

/// What no label counts for, and no token.
void nothing_counts() {
  Problem p(200, 500, 64, 1);
  p.host_label.assign(p.host_label.size(), kIgnoreIndex);
  p.label.set(p.host_label);
  const Device<float> one(std::vector<float>{1});
  GpuLinearCrossEntropy loss(Gpu{}, {.tokens = p.m, .vocab = p.vocab});
  const Gpu gpu = with_workspace(loss, p, p.head(), {});
  p.poison();
  loss.forward_backward(gpu, p.head(), {}, one.vector(), p.gradients(), p.value.data(), p.tokens());
  const Result got = p.result();
  expect(got.value.sum == 0 && got.value.divisor == 0 && std::isnan(got.value.value()), "the mean of nothing");
  bool zero = true;
  for (float x : got.loss) zero = zero && x == 0;
  for (float x : got.d_weight) zero = zero && x == 0;
  for (bf16 x : got.d_h) zero = zero && float(x) == 0;
  expect(zero, "tokens that do not count leave something");

  LinearHead<bf16> head = p.head();
  head.h.rows = 0;
  head.inv_rms.size = head.label.size = 0;
  auto gradients = p.gradients();
  gradients.d_h.rows = 0;
  p.poison();
  loss.forward_backward(gpu, head, {.reduction = Reduction::sum}, one.vector(), gradients, p.value.data());
  expect(p.result().value.sum == 0 && p.result().value.divisor == 1, "the sum over no tokens");
  zero = true;
  for (float x : p.d_weight.get()) zero = zero && x == 0;
  expect(zero, "no tokens leave a gradient");
}

void labels_that_are_no_ids() {
  Problem p(300, 1000, 64, 1);
  const std::vector<std::pair<size_t, int32_t>> bad = {
      {0, 1000}, {5, -1}, {130, std::numeric_limits<int32_t>::max()}, {299, std::numeric_limits<int32_t>::min()}};
  for (const auto& [row, label] : bad) p.host_label[row] = label;
  p.label.set(p.host_label);
  const Device<float> one(std::vector<float>{1});
  GpuLinearCrossEntropy loss(Gpu{}, {.tokens = p.m, .vocab = p.vocab, .chunk_tokens = 128});
  p.poison();
  loss.forward_backward(Gpu{}, p.head(), {.divisor = 100}, one.vector(), p.gradients(), p.value.data(), p.tokens());
  const Result got = p.result();
  expect(std::isnan(got.value.sum), "the sum hides a label that is no id");
  for (size_t i = 0; i < got.loss.size(); ++i) {
    bool is_bad = false;
    for (const auto& [row, label] : bad) is_bad = is_bad || row == i;
    expect(std::isnan(got.loss[i]) == is_bad, "the loss of row " + std::to_string(i));
    expect(std::isnan(float(got.d_h[i * 64])) == is_bad, "the gradient of row " + std::to_string(i));
  }
}

void graphs() {
  Problem p(300, 1000, 64, 1);
  const Device<float> upstream(std::vector<float>{1});
  GpuLinearCrossEntropy loss(Gpu{}, {.tokens = p.m, .vocab = p.vocab, .chunk_tokens = 128});
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Gpu gpu(stream);
  const auto run = [&] {
    loss.forward_backward(gpu, p.head(), {}, upstream.vector(), p.gradients(), p.value.data(), p.tokens());
  };
  std::vector<std::vector<int32_t>> labels = {p.host_label, p.labels()};
  labels[1][17] = kIgnoreIndex;  // another divisor
  std::vector<Result> want;
  for (size_t i = 0; i < 2; ++i) {
    p.label.set(labels[i]);
    upstream.set({i == 0 ? 1.f : 0.5f});
    p.poison();
    check(cudaDeviceSynchronize());
    run();
    want.push_back(p.result());
  }
  expect(!(want[0] == want[1]), "other labels give the same result");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  const size_t order[] = {0, 1, 0};
  for (const size_t i : order) {
    p.label.set(labels[i]);
    upstream.set({i == 0 ? 1.f : 0.5f});
    p.poison();
    check(cudaDeviceSynchronize());
    check(cudaGraphLaunch(executable, stream));
    expect(p.result() == want[i], "a replayed graph gives other bits");
  }
}

template <class E, class Call>
void refused(const Call& call, const std::string& what) {
  try {
    call();
    expect(false, "accepted; it should be refused: " + what);
  } catch (const E& error) {
    expect(error.what() == what, std::string("the refusal says: ") + error.what());
  }
}

void front_door() {
  const Problem p(8, 64, 64, 1), odd(8, 65, 64, 1);
  const Gpu gpu;
  const Device<float> one(std::vector<float>{1});
  GpuLinearCrossEntropy loss(gpu, {.tokens = 8, .vocab = 64}), few(gpu, {.tokens = 7, .vocab = 64}),
      other(gpu, {.tokens = 8, .vocab = 65}), forward(gpu, {.tokens = 8, .vocab = 64, .gradients = false});
  const auto run = [&](GpuLinearCrossEntropy& with, const Problem& of) {
    with.forward_backward(gpu, of.head(), {}, one.vector(), of.gradients(), of.value.data(), of.tokens());
  };
  p.poison();
  refused<OperandError>([&] { run(few, p); }, "h is 8 tokens; it needs at most the 7 that the loss was made for");
  refused<OperandError>([&] { run(loss, odd); },
                        "weight is of a vocabulary of 65; it needs the 64 that the loss was made for");
  refused<UsageError>([&] { run(forward, p); }, "the loss was made without gradients, and is asked for some");
  refused<UsageError>([&] { loss.forward(gpu, p.head(), {.z_loss = -1}, p.value.data()); },
                      "z_loss is -1; it needs to be 0 or more");
  refused<OperandError>([&] { loss.forward(gpu, p.head(), {}, nullptr); },
                        "value is null; it needs memory of the device for a LossValue");
  const int64_t bytes = other.workspace(odd.head(), {}, odd.gradients());
  refused<OperandError>([&] { run(other, odd); }, "workspace is 0 bytes; it needs " + std::to_string(bytes) +
                                                      " bytes (GpuLinearCrossEntropy::workspace)");
  refused<UsageError>([&] { GpuLinearCrossEntropy(gpu, {.tokens = 8, .vocab = 0}); },
                      "vocab is 0; it needs to be 1 or more");
  bool untouched = true;
  for (float x : p.loss.get()) untouched = untouched && std::isnan(x);
  expect(untouched, "a refused call has written something");
  expect(loss.workspace(p.head(), {}, p.gradients()) == 0, "an aligned head asks for a workspace");
  // A forward pass alone keeps nothing.
  forward.forward(gpu, p.head(), {}, p.value.data());
  expect(std::isfinite(p.result().value.value()), "the forward pass of a loss without gradients");
}

}  // namespace
}  // namespace coda::test

int main() {
  coda::test::every_option();
  coda::test::edges();
  coda::test::nothing_counts();
  coda::test::labels_that_are_no_ids();
  coda::test::graphs();
  coda::test::front_door();
  if (coda::test::failures > 0) {
    std::printf("%d failures\n", coda::test::failures);
    return 1;
  }
  std::printf("passed\n");
}
