#include "attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_blocks.h"
#include "coda/error.h"
#include "cpu/isa.h"
#include "cpu/pool.h"

namespace coda::llama {

namespace detail {

namespace {

int64_t round_up(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

/// The largest size in tokens, a multiple of block and at most limit, whose block × width floats fit; at least block.
int64_t tokens_that_fit(int64_t floats, int64_t width, int64_t block, int64_t limit) {
  return std::clamp(floats / width / block * block, block, limit);
}

Blocking blocking(const AttentionShape& shape) {
  const int64_t group = shape.heads / shape.kv_heads;
  int64_t together = std::min<int64_t>(4, group);
  while (group % together != 0) --together;
  Blocking b{};
  b.heads_together = together;
  b.strip_tokens = together == 1 ? 32 : 16;
  b.query_chunk = tokens_that_fit(16384, group * shape.head_dim, b.strip_tokens, 256);
  b.key_block = 128;
  b.query_block = together == 1 ? 64 : together == 2 ? 32 : 16;
  b.key_strip = 64;
  b.key_chunk = tokens_that_fit(16384, shape.head_dim, b.query_block, 256);
  return b;
}

// ---- what can be wrong with a call ------------------------------------------------------------------------------------

void check(const AttentionShape& shape) {
  if (shape.heads <= 0 || shape.kv_heads <= 0 || shape.heads % shape.kv_heads != 0)
    throw OperandError("shape", fmt::format("of {} heads and {} key heads", shape.heads, shape.kv_heads),
                       "a positive number of key heads that divides the heads");
  if (shape.head_dim <= 0 || shape.head_dim % 16 != 0)
    throw OperandError("shape", fmt::format("of head_dim {}", shape.head_dim), "a positive multiple of 16");
}

template <class T>
void check(const char* name, const Matrix<T>& matrix, int64_t rows, int64_t cols) {
  if (matrix.rows != rows || matrix.cols != cols)
    throw OperandError(name, fmt::format("of shape {}x{}", matrix.rows, matrix.cols), fmt::format("{}x{}", rows, cols));
  if (rows == 0) return;
  if (rows > 1 && matrix.stride < cols)
    throw OperandError(name, fmt::format("of stride {}", matrix.stride), fmt::format("at least its {} columns", cols));
  if (cols > 0 && matrix.data == nullptr)
    throw OperandError(name, "null", fmt::format("memory for {}x{} elements", rows, cols));
}

void check(std::span<const int64_t> document_starts, int64_t tokens) {
  if (document_starts.empty()) throw OperandError("document_starts", "empty", "at least the number of tokens");
  if (document_starts.front() != 0)
    throw OperandError("document_starts", fmt::format("{} at 0", document_starts.front()), "0 there");
  for (size_t i = 1; i < document_starts.size(); ++i)
    if (document_starts[i] < document_starts[i - 1])
      throw OperandError("document_starts", fmt::format("{} at {}", document_starts[i], i),
                         fmt::format("at least the {} before it", document_starts[i - 1]));
  if (document_starts.back() != tokens)
    throw OperandError("document_starts", fmt::format("{} at the end", document_starts.back()),
                       fmt::format("the number of tokens, {}", tokens));
}

}  // namespace

int64_t forward_scratch_floats(const AttentionShape& shape, const Blocking& b) {
  const int64_t chunk_rows = b.query_chunk * (shape.heads / shape.kv_heads);
  return 2 * chunk_rows * (shape.head_dim + 1) + b.key_block * (2 * shape.head_dim + b.strip_rows());
}

int64_t backward_scratch_floats(const AttentionShape& shape, const Blocking& b) {
  const int64_t cols = b.query_columns();
  return 5 * b.key_chunk * shape.head_dim + cols * (6 * shape.head_dim + 2 * b.key_strip + 2);
}

int64_t decode_scratch_floats(const AttentionShape& shape) {
  return shape.heads / shape.kv_heads * (2 * shape.head_dim + kDecodeKeys + 2);
}

void Progress::reach(int64_t done) {
  tokens.store(done, std::memory_order_release);
  tokens.notify_all();
}

void Progress::wait_for(int64_t needed) const {
  for (int64_t done; (done = tokens.load(std::memory_order_acquire)) < needed;) tokens.wait(done);
}

}  // namespace detail

template <class E>
void attention_forward(Cpu& cpu, const AttentionShape& shape, std::span<const int64_t> document_starts,
                       Matrix<const E> qkv, Matrix<E> out, Matrix<float> log_sum_exp) {
  using namespace detail;
  check(shape);
  check("qkv", qkv, qkv.rows, shape.qkv_width());
  check("out", out, qkv.rows, shape.query_width());
  if (log_sum_exp.data != nullptr) check("log_sum_exp", log_sum_exp, shape.heads, qkv.rows);
  check(document_starts, qkv.rows);

  const Blocking b = blocking(shape);
  int64_t longest = 0;
  std::vector<QueryChunk> chunks;
  for (size_t i = 0; i + 1 < document_starts.size(); ++i) {
    const Document document{.start = document_starts[i], .tokens = document_starts[i + 1] - document_starts[i]};
    longest = std::max(longest, document.tokens);
    for (int64_t first = 0; first < document.tokens; first += b.query_chunk)
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        chunks.push_back({.document = document, .kv_head = head, .first = first});
  }
  // Those that see the most keys go first, so that the threads end together.
  std::stable_sort(chunks.begin(), chunks.end(),
                   [](const QueryChunk& x, const QueryChunk& y) { return x.first > y.first; });

  std::vector<cpu::Microkernel> scores, first_values, more_values;
  const int64_t dh = shape.head_dim, rows = b.strip_rows();
  const int64_t most_keys = std::min(b.key_block, round_up(longest, b.strip_tokens));
  for (int64_t keys = kTile; keys <= most_keys; keys += kTile) {
    scores.emplace_back(rows, keys, dh, dh, b.key_block, b.key_block, false);
    first_values.emplace_back(rows, dh, keys, b.key_block, dh, dh, false);
    more_values.emplace_back(rows, dh, keys, b.key_block, dh, dh, true);
  }
  const Forward<E> forward{
      .shape = shape,
      .blocking = b,
      .products = {.scores = scores.data(), .first_values = first_values.data(), .more_values = more_values.data()},
      .qkv = qkv,
      .out = out,
      .log_sum_exp = log_sum_exp};
  const int64_t floats = forward_scratch_floats(shape, b);
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(floats);
  const auto run = cpu::for_chosen_isa([](auto isa) { return &attend<decltype(isa), E>; });
  cpu.parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t index, int thread) {
    run(forward, chunks[static_cast<size_t>(index)],
        cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(floats));
  });
}

template <class E>
void attention_backward(Cpu& cpu, const AttentionShape& shape, std::span<const int64_t> document_starts,
                        Matrix<const E> qkv, Matrix<const E> out, Matrix<const E> d_out,
                        Matrix<const float> log_sum_exp, Matrix<E> d_qkv) {
  using namespace detail;
  check(shape);
  check("qkv", qkv, qkv.rows, shape.qkv_width());
  check("out", out, qkv.rows, shape.query_width());
  check("d_out", d_out, qkv.rows, shape.query_width());
  check("log_sum_exp", log_sum_exp, shape.heads, qkv.rows);
  check("d_qkv", d_qkv, qkv.rows, shape.qkv_width());
  check(document_starts, qkv.rows);

  const Blocking b = blocking(shape);
  int64_t longest = 0;
  std::vector<KeyChunk> chunks;
  for (size_t i = 0; i + 1 < document_starts.size(); ++i) {
    const Document document{.start = document_starts[i], .tokens = document_starts[i + 1] - document_starts[i]};
    longest = std::max(longest, document.tokens);
    for (int64_t first = 0; first < document.tokens; first += b.key_chunk)
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        chunks.push_back({.document = document, .kv_head = head, .first = first, .previous = nullptr, .own = nullptr});
  }
  std::vector<Progress> progress(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].own = &progress[i];
    if (chunks[i].first > 0) chunks[i].previous = &progress[i - static_cast<size_t>(shape.kv_heads)];
  }
  // Threads take the chunks in this order. A chunk comes after the one that it waits for, which is at work or done by then: no
  // thread waits for ever. The chunks that are seen by the most queries come first, so that the threads end together.
  std::stable_sort(chunks.begin(), chunks.end(), [](const KeyChunk& x, const KeyChunk& y) {
    return x.document.tokens - x.first > y.document.tokens - y.first;
  });
  std::vector<BackwardProducts> by_keys, by_tiles;
  const int64_t dh = shape.head_dim, cols = b.query_columns();
  const auto products = [&](int64_t keys, int64_t some_cols) {
    return BackwardProducts{.scores = {keys, some_cols, dh, dh, cols, cols, false},
                            .keys = {keys, dh, some_cols, cols, dh, dh, true},
                            .queries = {dh, some_cols, keys, b.key_chunk, cols, cols, true}};
  };
  for (int64_t tiles = 1; tiles * kTile <= b.query_block; ++tiles)
    by_tiles.push_back(products(kTile, tiles * kTile * b.heads_together));
  for (int64_t keys = kTile; keys <= std::min(b.key_strip, longest); keys += kTile)
    by_keys.push_back(products(keys, cols));

  // For float the gradient itself is where the parts are added.
  Matrix<float> d_q_sum;
  if constexpr (std::is_same_v<E, float>)
    d_q_sum = d_qkv.col_range(0, shape.query_width());
  else if (longest > b.key_chunk)
    d_q_sum =
        Matrix<float>(cpu.pool().shared_scratch.floats(qkv.rows * shape.query_width()), qkv.rows, shape.query_width());

  const Backward<E> backward{.shape = shape,
                             .blocking = b,
                             .by_keys = by_keys.data(),
                             .by_tiles = by_tiles.data(),
                             .qkv = qkv,
                             .out = out,
                             .d_out = d_out,
                             .log_sum_exp = log_sum_exp,
                             .d_qkv = d_qkv,
                             .d_q_sum = d_q_sum};
  const int64_t floats = backward_scratch_floats(shape, b);
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(floats);
  const auto run = cpu::for_chosen_isa([](auto isa) { return &attend_backward<decltype(isa), E>; });
  cpu.parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t index, int thread) {
    run(backward, chunks[static_cast<size_t>(index)],
        cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(floats));
  });
}

template <class E>
void attention_decode(Cpu& cpu, const AttentionShape& shape, const E* q, Matrix<const E> k, Matrix<const E> v, E* out) {
  using namespace detail;
  check(shape);
  if (k.rows < 1) throw OperandError("k", fmt::format("of {} rows", k.rows), "the query's own token at least");
  check("k", k, k.rows, shape.kv_width());
  check("v", v, k.rows, shape.kv_width());
  if (q == nullptr) throw OperandError("q", "null", fmt::format("memory for {} elements", shape.query_width()));
  if (out == nullptr) throw OperandError("out", "null", fmt::format("memory for {} elements", shape.query_width()));

  const Decode<E> decode{.shape = shape, .q = q, .k = k, .v = v, .out = out};
  const int64_t floats = decode_scratch_floats(shape);
  for (auto& scratch : cpu.pool().thread_scratch) scratch.floats(floats);
  const auto run = cpu::for_chosen_isa([](auto isa) { return &attend_one<decltype(isa), E>; });
  cpu.parallel_for(shape.kv_heads, [&](int64_t head, int thread) {
    run(decode, head, cpu.pool().thread_scratch[static_cast<size_t>(thread)].floats(floats));
  });
}

#define CODA_ATTENTION(E)                                                                                     \
  template void attention_forward<E>(Cpu&, const AttentionShape&, std::span<const int64_t>, Matrix<const E>,  \
                                     Matrix<E>, Matrix<float>);                                               \
  template void attention_backward<E>(Cpu&, const AttentionShape&, std::span<const int64_t>, Matrix<const E>, \
                                      Matrix<const E>, Matrix<const E>, Matrix<const float>, Matrix<E>);      \
  template void attention_decode<E>(Cpu&, const AttentionShape&, const E*, Matrix<const E>, Matrix<const E>, E*)
CODA_ATTENTION(float);
CODA_ATTENTION(bf16);
#undef CODA_ATTENTION

}  // namespace coda::llama
