#include "explain/block.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coda/error.h"
#include "coda/loss.h"
#include "operand_shape.h"

namespace coda::explain {
namespace {

constexpr ElementType kFloat = ElementType::float32;

void check_positive(const char* flag, int64_t value) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  if (value < 1 || value > kMax) throw UsageError(fmt::format("{} is {}; it needs 1 to {}", flag, value, kMax));
}

void check_multiple(const char* flag, int64_t value, int64_t of, const char* reason) {
  if (value % of != 0) throw UsageError(fmt::format("{} is {}; it needs a multiple of {}{}", flag, value, of, reason));
}

int64_t gcd_power_of_two(int64_t value, int64_t most) {
  int64_t power = 1;
  while (power < most && value % (2 * power) == 0) power *= 2;
  return power;
}

/// Makes rows of one block: sizes and bytes under their names.
class Rows {
 public:
  explicit Rows(const Block& block)
      : block_(block),
        m_(block.tokens),
        d_(block.hidden),
        f_(block.ffn),
        q_(block.query_width()),
        w_(block.qkv_width()) {}

  std::vector<Row> all() {
    forward();
    in_loss_ = true;
    if (block_.vocab) vocabulary();
    in_loss_ = false;
    backward();
    return std::move(rows_);
  }

 private:
  void forward();
  void vocabulary();
  void backward();

  /// Bytes of [rows, cols] of activations, of floats.
  int64_t tile(int64_t rows, int64_t cols) const { return rows * cols * detail::bytes_of(block_.element); }
  static int64_t floats(int64_t count) { return count * 4; }
  Tensor tensor(const char* name, int64_t cols) const { return {name, m_, cols, block_.element}; }
  Tensor vector(const char* name) const { return {name, 1, m_, kFloat}; }

  const Program* program(const std::string& name, const std::string& option = "") const {
    const std::string element(explain::name(block_.element));
    return &find_program(name + "<" + element + (option.empty() ? "" : "," + option) + ">");
  }

  /// A product that only stores its result.
  Kernel gemm(int64_t m, int64_t n, int64_t k) const {
    return {.name = "GEMM", .flops = 2 * m * n * k, .read = tile(m + n, k), .written = tile(m, n)};
  }
  static Kernel pass(const char* name, int64_t read, int64_t written) { return {name, 0, read, written}; }
  Kernel norm() const { return pass("RMSNorm", tile(m_, d_) + tile(1, d_), tile(m_, d_) + floats(m_)); }
  Kernel add() const { return pass("add", 2 * tile(m_, d_), tile(m_, d_)); }
  Kernel add_norm() const {
    return pass("add + RMSNorm", 2 * tile(m_, d_) + tile(1, d_), 2 * tile(m_, d_) + floats(m_));
  }
  Kernel norm_backward() const {
    return pass("RMSNorm backward", 2 * tile(m_, d_) + tile(1, d_) + floats(m_), tile(m_, d_) + tile(1, d_));
  }
  Kernel norm_backward_add() const {
    return pass("RMSNorm backward + add", 3 * tile(m_, d_) + tile(1, d_) + floats(m_), tile(m_, d_) + tile(1, d_));
  }
  Kernel rope(const char* name) const {
    const int64_t turned = tile(m_, q_ + block_.kv_width());
    return pass(name, turned + floats(m_), turned);  // positions; tables of cos and sin are not counted
  }

  Row& product(const char* name, bool backward, const char* what, Form form, Sizes sizes, const Program* program) {
    Row row{.name = name,
            .backward = backward,
            .loss = in_loss_,
            .step = sizes.k ? Step::product : Step::elementwise,
            .what = what,
            .form = form,
            .sizes = sizes,
            .program = program,
            .formula = program->formula};
    row.fused = fused(*program, sizes, block_.element);
    return rows_.emplace_back(std::move(row));
  }
  void finish(const char* name, bool backward, const char* formula, int64_t read, int64_t written) {
    rows_.push_back(Row{.name = name,
                        .backward = backward,
                        .loss = in_loss_,
                        .step = Step::finish,
                        .what = "second stage",
                        .form = Form::tn,
                        .sizes = {},
                        .program = nullptr,
                        .formula = formula,
                        .fused = pass(name, read, written)});
  }
  void attention(const char* name, bool backward, const char* formula, Kernel kernel) {
    rows_.push_back(Row{.name = name,
                        .backward = backward,
                        .loss = in_loss_,
                        .step = Step::attention,
                        .what = "attention",
                        .form = Form::tn,
                        .sizes = {},
                        .program = nullptr,
                        .formula = formula,
                        .fused = kernel,
                        .separate = {kernel},
                        .compiled = {kernel}});
  }
  /// A weight gradient out = aᵀ b over tokens, in float.
  void weight_gradient(const char* name, const char* what, int64_t rows, int64_t cols) {
    Row& row = product(name, true, what, Form::nt, {rows, cols, m_},
                       &find_program(block_.element == kFloat ? "Store<float>" : "Store<bf16, float>"));
    row.separate = row.compiled = {row.fused};
  }

  const Block& block_;
  const int64_t m_, d_, f_, q_, w_;
  bool in_loss_ = false;
  std::vector<Row> rows_;
};

void Rows::forward() {
  Row& f4 = product("F4", false, "h·W̃qkvᵀ", Form::tn, {m_, w_, d_}, program("RmsNormRope"));
  f4.separate = {norm(), gemm(m_, w_, d_), rope("RoPE")};
  f4.compiled = {gemm(m_, w_, d_), rope("RoPE")};
  f4.kept = {tensor("h", d_), vector("r"), tensor("qkv", w_)};
  f4.kept_separate = {tensor("h", d_), vector("r"), tensor("x", d_), tensor("qkv", w_)};

  // Causal: half of the scores, for q·kᵀ and p·v.
  attention("attention", false, "softmax(q kᵀ / √d) v, causal, in blocks",
            {.name = "attention",
             .flops = 2 * m_ * block_.seq * q_,
             .read = tile(m_, w_),
             .written = tile(m_, q_) + floats(block_.heads * m_)});
  rows_.back().kept = {tensor("a", q_), Tensor{"lse", block_.heads, m_, kFloat}};
  rows_.back().kept_separate = rows_.back().kept;

  Row& f1 = product("F1", false, "a·Woᵀ", Form::tn, {m_, d_, q_}, program("Residual"));
  f1.separate = {gemm(m_, d_, q_), add()};
  f1.compiled = {gemm(m_, d_, q_), add_norm()};
  f1.kept = f1.kept_separate = {tensor("h_mid", d_), vector("r_mid")};
  finish("finish r_mid", false, "r_mid = 1/√(Σ h_mid²/D + ε)", floats(detail::row_slot_count(d_) * m_), floats(m_));

  Row& f2 = product("F2", false, "h_mid·W̃guᵀ", Form::tn, {m_, 2 * f_, d_}, program("RmsNormSwiGlu"));
  const Kernel swiglu = pass("SwiGLU", tile(m_, 2 * f_), tile(m_, f_));
  f2.separate = {norm(), gemm(m_, 2 * f_, d_), swiglu};
  f2.compiled = {gemm(m_, 2 * f_, d_), swiglu};
  f2.kept = {tensor("gate_up", 2 * f_)};
  f2.kept_separate = {tensor("x_mid", d_), tensor("gate_up", 2 * f_), tensor("y", f_)};

  Row& f3 = product("F3", false, "y·Wdᵀ", Form::tn, {m_, d_, f_}, program("Residual"));
  f3.separate = {gemm(m_, d_, f_), add()};
  f3.compiled = {gemm(m_, d_, f_), add_norm()};
  finish("finish r_next", false, "r_next = 1/√(Σ h_next²/D + ε)", floats(detail::row_slot_count(d_) * m_), floats(m_));
}

void Rows::vocabulary() {
  const int64_t v = *block_.vocab, chunks = block_.chunks();
  // The vocabulary's weight is read for every chunk, and its gradient read and written.
  const int64_t weight_again = (chunks - 1) * tile(v, d_), gradient_again = (chunks - 1) * floats(v * d_);
  const int64_t partials = floats(detail::row_slot_count(v) * m_);

  Row& f5 = product("F5", false, "h_next·W̃lmᵀ", Form::tn, {m_, v, d_}, program("CrossEntropy"));
  f5.fused.read += weight_again;
  const Kernel loss = pass("cross-entropy", tile(m_, v) + floats(m_), 2 * floats(m_));
  f5.separate = {norm(), gemm(m_, v, d_), loss};
  f5.compiled = {gemm(m_, v, d_), loss};
  f5.kept = {tensor("h_next", d_), vector("r_next")};
  f5.kept_separate = {tensor("h_next", d_), vector("r_next"), tensor("x_next", d_), tensor("logits", v), vector("lse")};
  finish("finish lse", false, "lse = log Σ exp l;  l[label]", 3 * partials, 2 * floats(m_));

  Row& b5 = product("B5", true, "logits, in place", Form::tn, {m_, v, {}}, program("CrossEntropyBackward"));
  b5.separate = b5.compiled = {pass("cross-entropy backward", tile(m_, v) + 3 * floats(m_), tile(m_, v))};
  finish("finish s_next", true, "s_next = Σ d_l·l / D", partials, floats(m_));
  Row& lm = product("B5 product", true, "d_l′·W̃lm", Form::nn, {m_, d_, v}, program("RmsNormBackward", "StreamEnds"));
  lm.fused.read += weight_again;
  lm.separate = lm.compiled = {gemm(m_, d_, v), norm_backward()};
  weight_gradient("W lm", "d_l′ᵀ·h_next", v, d_);
  rows_.back().fused.read += gradient_again;
  rows_.back().fused.written += gradient_again;
}

void Rows::backward() {
  Row& b3 = product("B3", true, "d_h_next·Wd", Form::nn, {m_, f_, d_}, program("SwiGluBackward"));
  b3.separate = b3.compiled = {gemm(m_, f_, d_), pass("SwiGLU backward", tile(m_, 3 * f_), tile(m_, 2 * f_))};
  finish("finish s_mid", true, "s_mid = Σ d_z·z / D", floats(detail::row_slot_count(f_) * m_), floats(m_));
  weight_gradient("W down", "d_h_nextᵀ·y", d_, f_);

  Row& b2 = product("B2", true, "d_z′·W̃gu", Form::nn, {m_, d_, 2 * f_}, program("RmsNormBackward"));
  b2.separate = {gemm(m_, d_, 2 * f_), norm_backward(), add()};
  b2.compiled = {gemm(m_, d_, 2 * f_), norm_backward_add()};
  weight_gradient("W gate_up", "d_z′ᵀ·h_mid", 2 * f_, d_);

  Row& b1 = product("B1", true, "d_h_mid·Wo", Form::nn, {m_, q_, d_}, program("Store"));
  b1.separate = b1.compiled = {b1.fused};
  weight_gradient("W o", "d_h_midᵀ·a", d_, q_);

  // q·kᵀ again, d_o·vᵀ, and the three gradients.
  attention("attention backward", true, "d_qkv from d_a, scores made again",
            {.name = "attention backward",
             .flops = 5 * m_ * block_.seq * q_,
             .read = tile(m_, w_ + 2 * q_) + floats(block_.heads * m_),
             .written = tile(m_, w_)});

  Row& b4 = product("B4", true, "d_qkv, in place", Form::tn, {m_, w_, {}}, program("RopeBackward"));
  b4.separate = b4.compiled = {rope("RoPE backward")};
  finish("finish s", true, "s = Σ d_qkv·qkv / D", floats(detail::row_slot_count(w_) * m_), floats(m_));
  Row& qkv = product("B4 product", true, "d_qkv′·W̃qkv", Form::nn, {m_, d_, w_}, program("RmsNormBackward"));
  qkv.separate = {gemm(m_, d_, w_), norm_backward(), add()};
  qkv.compiled = {gemm(m_, d_, w_), norm_backward_add()};
  weight_gradient("W qkv", "d_qkv′ᵀ·h", w_, d_);
}

void add(Sum& sum, std::span<const Kernel> kernels, const std::optional<Machine>& machine) {
  for (const Kernel& kernel : kernels) {
    sum.flops += kernel.flops;
    sum.read += kernel.read;
    sum.written += kernel.written;
  }
  if (machine) sum.seconds += machine->seconds(kernels);
}

bool belongs(const Row& row, Part part) {
  switch (part) {
    case Part::layer_forward:
      return !row.loss && !row.backward;
    case Part::layer_backward:
      return !row.loss && row.backward;
    case Part::layer:
      return !row.loss;
    case Part::attention:
      return row.step == Step::attention;
    case Part::loss:
      return row.loss;
    case Part::all:
      break;
  }
  return true;
}

}  // namespace

int64_t Block::product_weights() const {
  return hidden * (qkv_width() + query_width() + 3 * ffn + vocab.value_or(0));
}

Block completed(Block b) {
  check_positive("--tokens", b.tokens);
  check_positive("--hidden", b.hidden);
  check_positive("--ffn", b.ffn);
  if (b.vocab) check_positive("--vocab", *b.vocab);
  constexpr int64_t kHeadDim = 128;
  if (b.heads == 0) {
    if (b.head_dim == 0) b.head_dim = std::min(kHeadDim, gcd_power_of_two(b.hidden, kHeadDim));
    if (b.head_dim > 0) {
      check_multiple("--hidden", b.hidden, b.head_dim, " (--head-dim), or --heads");
      b.heads = b.hidden / b.head_dim;
    }
  }
  check_positive("--heads", b.heads);
  if (b.head_dim == 0) {
    check_multiple("--hidden", b.hidden, b.heads, " (--heads), or --head-dim");
    b.head_dim = b.hidden / b.heads;
  }
  check_positive("--head-dim", b.head_dim);
  check_multiple("--head-dim", b.head_dim, 16, "");
  if (b.kv_heads == 0) b.kv_heads = b.heads % 4 == 0 ? b.heads / 4 : b.heads;
  check_positive("--kv-heads", b.kv_heads);
  check_multiple("--heads", b.heads, b.kv_heads, " (--kv-heads)");
  check_multiple("--hidden", b.hidden, 8, "");
  check_multiple("--ffn", b.ffn, 8, "");
  constexpr int64_t kSeq = 4096;
  if (b.seq == 0) b.seq = std::min(kSeq, b.tokens);
  check_positive("--seq", b.seq);
  if (b.seq > b.tokens)
    throw UsageError(fmt::format("--seq is {}; it needs at most the {} of --tokens", b.seq, b.tokens));
  const int64_t widest = std::max({b.vocab.value_or(0), 2 * b.ffn, b.hidden});
  const double flops = 24.0 * static_cast<double>(b.tokens) * static_cast<double>(b.hidden + b.heads * b.head_dim) *
                       static_cast<double>(widest + b.heads * b.head_dim + b.seq);
  if (flops >= double(int64_t{1} << 60))
    throw UsageError("--tokens, --hidden and --ffn are too large; they need a layer below 2^60 FLOPs");
  if (b.vocab && b.chunk == 0)
    b.chunk = b.element == ElementType::bfloat16 ? LinearCrossEntropy<bf16>::chunk_tokens(*b.vocab, b.tokens)
                                                 : LinearCrossEntropy<float>::chunk_tokens(*b.vocab, b.tokens);
  if (!b.vocab && b.chunk != 0) throw UsageError("--chunk is of the loss; it needs --vocab");
  if (b.vocab) {
    check_positive("--chunk", b.chunk);
    b.chunk = std::min(b.chunk, b.tokens);
  }
  return b;
}

std::vector<Row> rows(const Block& block) {
  return Rows(block).all();
}

Totals total(const std::vector<Row>& rows, Part part, const std::optional<Machine>& machine) {
  Totals totals;
  for (const Row& row : rows) {
    if (!belongs(row, part)) continue;
    for (const Tensor& tensor : row.kept) totals.kept += tensor.bytes();
    for (const Tensor& tensor : row.kept_separate) totals.kept_separate += tensor.bytes();
    const bool attention = part == Part::attention || part == Part::all;
    if (row.step == Step::attention && !attention) continue;
    add(totals.fused, std::span(&row.fused, 1), machine);
    add(totals.separate, row.separate, machine);
    add(totals.compiled, row.compiled, machine);
  }
  return totals;
}

}  // namespace coda::explain
