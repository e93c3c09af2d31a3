// Attention on the GPU against its definition in double, from the same bf16 inputs: equal and ragged documents, grouped heads, odd
// lengths, backward passes in parts, CUDA graphs, bitwise repetition. Needs a GPU of compute capability 9.0 and cuDNN; not part of
// `make test`. Prints "passed" last, or exits with 1.
#include "hopper/attention.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hopper/device_memory.h"
#include "hopper/replay.h"

namespace coda::test {
namespace {

using hopper::Attention;
using hopper::AttentionBatch;
using hopper::DeviceBuffer;
using llama::AttentionShape;

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

constexpr std::byte kNan{0xff};  // a NaN as bf16 and as float

struct Rows {  // [rows][cols], in double
  int64_t rows, cols;
  std::vector<double> data;
  Rows(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_), data(static_cast<size_t>(rows_ * cols_)) {}
  double* row(int64_t i) { return data.data() + i * cols; }
  const double* row(int64_t i) const { return data.data() + i * cols; }
};
Rows to_double(const std::vector<bf16>& values, int64_t cols) {
  Rows rows(static_cast<int64_t>(values.size()) / cols, cols);
  for (size_t i = 0; i < values.size(); ++i) rows.data[i] = static_cast<double>(static_cast<float>(values[i]));
  return rows;
}
double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}
void add(double* to, double factor, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * x[i];
}

struct Results {
  Rows out, d_qkv;
};
/// The query heads of one key head.
void attend(const AttentionShape& s, int64_t kv_head, const std::vector<int64_t>& starts, const Rows& qkv,
            const Rows& d_out, Results& to) {
  const int64_t dh = s.head_dim, group = s.heads / s.kv_heads;
  const int64_t k0 = s.query_width() + kv_head * dh, v0 = k0 + s.kv_width();
  const double scale = 1 / std::sqrt(static_cast<double>(dh));
  for (int64_t q0 = kv_head * group * dh; q0 < (kv_head + 1) * group * dh; q0 += dh)
    for (size_t document = 0; document + 1 < starts.size(); ++document)
      for (int64_t i = starts[document]; i < starts[document + 1]; ++i) {
        std::vector<double> p;
        double top = -HUGE_VAL, sum = 0;
        for (int64_t t = starts[document]; t <= i; ++t) {
          p.push_back(scale * dot(qkv.row(i) + q0, qkv.row(t) + k0, dh));
          top = std::max(top, p.back());
        }
        for (double& x : p) sum += x = std::exp(x - top);
        for (double& x : p) x /= sum;
        double* out = to.out.row(i) + q0;
        const double* d_o = d_out.row(i) + q0;
        for (size_t j = 0; j < p.size(); ++j)
          add(out, p[j], qkv.row(starts[document] + static_cast<int64_t>(j)) + v0, dh);
        const double delta = dot(d_o, out, dh);
        for (size_t j = 0; j < p.size(); ++j) {
          const int64_t t = starts[document] + static_cast<int64_t>(j);
          const double d_s = scale * p[j] * (dot(d_o, qkv.row(t) + v0, dh) - delta);
          add(to.d_qkv.row(i) + q0, d_s, qkv.row(t) + k0, dh);
          add(to.d_qkv.row(t) + k0, d_s, qkv.row(i) + q0, dh);
          add(to.d_qkv.row(t) + v0, p[j], d_o, dh);
        }
      }
}
Results reference(const AttentionShape& s, const std::vector<int64_t>& starts, const Rows& qkv, const Rows& d_out) {
  Results results{Rows(qkv.rows, s.query_width()), Rows(qkv.rows, s.qkv_width())};
  std::vector<std::thread> threads;
  for (int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head)
    threads.emplace_back([&, kv_head] { attend(s, kv_head, starts, qkv, d_out, results); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

/// Columns [first, first + count) of got, heads of head_dim, against those of want. What rounding want to bf16 would lose is the unit:
/// probabilities, out and the scores' gradients are rounded to bf16 on the way, so that it becomes a few times that. An element is
/// measured by the largest of itself, the root mean square of its head's row, and that of the matrix: in rows that see few keys the
/// gradients cancel, so that their own size says nothing of what rounding does to them.
void compare(const std::string& what, const std::vector<bf16>& got_values, const Rows& want, int64_t first,
             int64_t count, int64_t head_dim) {
  const Rows got = to_double(got_values, want.cols);
  double square = 0, rounding = 0, error = 0, worst = 0;
  for (int64_t i = 0; i < want.rows; ++i) square += dot(want.row(i) + first, want.row(i) + first, count);
  const double rms = std::sqrt(square / static_cast<double>(want.rows * count));
  int64_t row = 0, col = first;
  for (int64_t i = 0; i < want.rows; ++i)
    for (int64_t head = first; head < first + count; head += head_dim) {
      const double size =
          std::sqrt(dot(want.row(i) + head, want.row(i) + head, head_dim) / static_cast<double>(head_dim));
      for (int64_t j = head; j < head + head_dim; ++j) {
        const double w = want.row(i)[j], r = static_cast<double>(static_cast<float>(bf16(static_cast<float>(w))));
        const double off = std::abs(got.row(i)[j] - w), allowed = 0x1p-9 * std::max({std::abs(w), size, rms});
        rounding += (r - w) * (r - w);
        error += off * off;
        // Not `>`: a NaN is the worst there is. The first query's d_q is 0, and so is d_k of a document of one token.
        if (!(off <= worst * allowed + 1e-5) && !std::isnan(worst)) worst = off / allowed, row = i, col = j;
      }
    }
  const double ratio = rounding > 0 ? std::sqrt(error / rounding) : 0;
  const std::string line = fmt::format(
      "{}: {:.2f} times the error of rounding ({:.2e} of the norm), worst element {:.1f} halves of a unit in row {}, "
      "column {}: {} for {}",
      what, ratio, std::sqrt(error / square), worst, row, col, got.row(row)[col], want.row(row)[col]);
  std::printf("  %s\n", line.c_str());
  expect(error < 1e-9 || (ratio < 3 && worst < 48), line);
}

std::vector<bf16> normal_numbers(int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<bf16> values(static_cast<size_t>(count));
  for (bf16& x : values) x = bf16(normal(random));
  return values;
}
template <class T>
std::vector<T> fetched(const DeviceBuffer<T>& buffer, int64_t rows) {
  std::vector<T> values(static_cast<size_t>(buffer.rows() * buffer.cols()));
  const_cast<DeviceBuffer<T>&>(buffer).memory().copy_to(reinterpret_cast<std::byte*>(values.data()));
  values.resize(static_cast<size_t>(rows * buffer.cols()));
  return values;
}
bool is_nan(const std::vector<bf16>& values, size_t from) {
  return std::all_of(values.begin() + static_cast<std::ptrdiff_t>(from), values.end(),
                     [](bf16 x) { return std::isnan(static_cast<float>(x)); });
}
bool same(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

/// Attention with its operands. Outputs have a row more, which nothing may write.
struct Problem {
  AttentionShape shape;
  AttentionBatch batch;
  cudaStream_t stream = nullptr;
  Gpu gpu;
  std::mt19937 random{7};
  std::vector<bf16> host_qkv, host_d_out;
  DeviceBuffer<bf16> qkv, d_out, out, d_qkv;
  DeviceBuffer<float> log_sum_exp;
  Attention attention;
  DeviceBuffer<std::byte> workspace;

  static cudaStream_t own_stream() {
    cudaStream_t made = nullptr;
    if (cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) != cudaSuccess) std::exit(1);
    return made;
  }
  Problem(const AttentionShape& shape_, const AttentionBatch& batch_)
      : shape(shape_),
        batch(batch_),
        stream(own_stream()),
        gpu(stream),
        host_qkv(normal_numbers(batch.tokens * shape.qkv_width(), 1.3f, random)),
        host_d_out(normal_numbers(batch.tokens * shape.query_width(), 1, random)),
        qkv(batch.tokens, shape.qkv_width()),
        d_out(batch.tokens, shape.query_width()),
        out(batch.tokens + 1, shape.query_width()),
        d_qkv(batch.tokens + 1, shape.qkv_width()),
        log_sum_exp(1, batch.tokens * shape.heads + 4),
        attention(gpu, shape, batch, true),
        workspace(1, attention.workspace_bytes()) {
    gpu.set_workspace(workspace.matrix().data, workspace.cols());
    qkv.memory().copy_from(reinterpret_cast<const std::byte*>(host_qkv.data()));
    d_out.memory().copy_from(reinterpret_cast<const std::byte*>(host_d_out.data()));
  }
  ~Problem() { cudaStreamDestroy(stream); }

  void poison() {
    for (hopper::DeviceMemory* memory : {&out.memory(), &d_qkv.memory(), &log_sum_exp.memory(), &workspace.memory()})
      memory->fill(kNan);
  }
  void enqueue() {
    attention.forward(gpu, qkv.matrix(), out.top(batch.tokens), log_sum_exp.matrix().data);
    attention.backward(gpu, qkv.matrix(), out.top(batch.tokens), d_out.matrix(), log_sum_exp.matrix().data,
                       d_qkv.top(batch.tokens));
  }
  /// What is there now against the definition.
  void check(const std::string& what, const std::vector<int64_t>& starts) {
    const Results want =
        reference(shape, starts, to_double(host_qkv, shape.qkv_width()), to_double(host_d_out, shape.query_width()));
    const std::vector<bf16> got = fetched(out, batch.tokens), got_d = fetched(d_qkv, batch.tokens);
    compare(what + " out", got, want.out, 0, shape.query_width(), shape.head_dim);
    compare(what + " d_q", got_d, want.d_qkv, 0, shape.query_width(), shape.head_dim);
    compare(what + " d_k", got_d, want.d_qkv, shape.query_width(), shape.kv_width(), shape.head_dim);
    compare(what + " d_v", got_d, want.d_qkv, shape.query_width() + shape.kv_width(), shape.kv_width(), shape.head_dim);
    expect(is_nan(fetched(out, batch.tokens + 1), got.size()), what + ": out is written past its end");
    expect(is_nan(fetched(d_qkv, batch.tokens + 1), got_d.size()), what + ": d_qkv is written past its end");
    const std::vector<float> sums = fetched(log_sum_exp, 1);
    for (size_t i = 0; i < 4; ++i)
      expect(std::isnan(sums[sums.size() - 1 - i]), what + ": log_sum_exp is written past its end");
    expect(same(fetched(qkv, batch.tokens), host_qkv), what + ": qkv has changed");
    expect(same(fetched(d_out, batch.tokens), host_d_out), what + ": d_out has changed");
  }
};

std::string name_of(const AttentionShape& s) {
  return fmt::format("{}/{} heads of {}", s.heads, s.kv_heads, s.head_dim);
}
std::vector<int64_t> equal_starts(int64_t documents, int64_t length) {
  std::vector<int64_t> starts;
  for (int64_t i = 0; i <= documents; ++i) starts.push_back(i * length);
  return starts;
}

void equal_documents(const AttentionShape& shape, int64_t documents, int64_t length, int64_t score_bytes) {
  const std::string what =
      fmt::format("{}, {} x {}{}", name_of(shape), documents, length, score_bytes == 1 ? ", in parts" : "");
  Problem problem(shape,
                  {.tokens = documents * length, .documents = documents, .length = length, .score_bytes = score_bytes});
  problem.poison();
  problem.enqueue();
  problem.check(what, equal_starts(documents, length));
  const std::vector<bf16> out = fetched(problem.out, problem.batch.tokens),
                          d_qkv = fetched(problem.d_qkv, problem.batch.tokens);
  for (int i = 0; i < 20; ++i) {
    problem.poison();
    problem.enqueue();
    expect(same(fetched(problem.out, problem.batch.tokens), out), what + ": out differs the next time");
    expect(same(fetched(problem.d_qkv, problem.batch.tokens), d_qkv), what + ": d_qkv differs the next time");
  }
  // Plans without a backward pass give the same.
  Attention forward(problem.gpu, shape, problem.batch, false);
  problem.poison();
  forward.forward(problem.gpu, problem.qkv.matrix(), problem.out.top(problem.batch.tokens), nullptr);
  expect(same(fetched(problem.out, problem.batch.tokens), out), what + ": out differs without a backward pass");
}

/// Plans for up to 8 documents of up to 200 tokens, captured and replayed with other documents.
void ragged_documents(const AttentionShape& shape, int64_t score_bytes) {
  const std::string what = fmt::format("{}, ragged{}", name_of(shape), score_bytes == 1 ? ", in parts" : "");
  const std::vector<std::vector<int64_t>> batches = {
      {0, 200, 333}, {0, 1, 1, 60, 61, 200, 333}, {0, 133, 333}, {0, 128, 192, 193, 194, 200, 201, 332, 333}};
  Problem problem(shape, {.tokens = 333, .documents = 8, .length = 200, .ragged = true, .score_bytes = score_bytes});
  hopper::Replay replay;
  std::vector<bf16> out, d_qkv;
  for (size_t i = 0; i < batches.size(); ++i) {
    problem.attention.set_documents(problem.gpu, batches[i]);
    problem.poison();
    replay.run(problem.gpu, [&] { problem.enqueue(); });
    problem.check(fmt::format("{}, batch {}", what, i), batches[i]);
    out = fetched(problem.out, problem.batch.tokens), d_qkv = fetched(problem.d_qkv, problem.batch.tokens);
  }
  for (int i = 0; i < 20; ++i) {
    problem.poison();
    replay.run(problem.gpu, [&] { problem.enqueue(); });
    expect(same(fetched(problem.out, problem.batch.tokens), out), what + ": out differs the next time");
    expect(same(fetched(problem.d_qkv, problem.batch.tokens), d_qkv), what + ": d_qkv differs the next time");
  }
}

template <class F>
void refuses(const std::string& operand, F&& call) {
  try {
    call();
    expect(false, operand + " is not refused");
  } catch (const OperandError& error) {
    std::printf("  %s\n", error.what());
    expect(error.operand() == operand, "the error names " + error.operand() + ", not " + operand);
  }
}

void refusals() {
  const AttentionShape shape{.heads = 4, .kv_heads = 2, .head_dim = 64};
  Problem equal(shape, {.tokens = 64, .documents = 2, .length = 32});
  Problem ragged(shape, {.tokens = 64, .documents = 2, .length = 40, .ragged = true});
  equal.poison();
  refuses("shape", [&] { Attention(equal.gpu, {.heads = 4, .kv_heads = 2, .head_dim = 20}, equal.batch, true); });
  refuses("shape", [&] { Attention(equal.gpu, {.heads = 4, .kv_heads = 2, .head_dim = 512}, equal.batch, true); });
  refuses("shape", [&] { Attention(equal.gpu, {.heads = 4, .kv_heads = 3, .head_dim = 64}, equal.batch, true); });
  refuses("batch", [&] { Attention(equal.gpu, shape, {.tokens = 63, .documents = 2, .length = 32}, true); });
  refuses("batch", [&] { equal.attention.set_documents(equal.gpu, std::vector<int64_t>{0, 64}); });
  refuses("documents", [&] { ragged.enqueue(); });
  for (const std::vector<int64_t>& starts :
       {std::vector<int64_t>{}, {0, 64}, {0, 32, 63}, {1, 32, 64}, {0, 20, 30, 64}, {0, 70, 64}})
    refuses("starts", [&] { ragged.attention.set_documents(ragged.gpu, starts); });
  float* sums = equal.log_sum_exp.matrix().data;
  const Matrix<bf16> out = equal.out.top(64);
  refuses("qkv", [&] { equal.attention.forward(equal.gpu, equal.qkv.top(63), out, sums); });
  refuses("qkv", [&] { equal.attention.forward(equal.gpu, {equal.qkv.matrix().data + 1, 64, 512}, out, sums); });
  refuses("out", [&] { equal.attention.forward(equal.gpu, equal.qkv.matrix(), {out.data, 64, 256, 264}, sums); });
  refuses("log_sum_exp", [&] { equal.attention.forward(equal.gpu, equal.qkv.matrix(), out, nullptr); });
  equal.gpu.set_workspace(nullptr, 0);
  refuses("gpu", [&] { equal.enqueue(); });
  expect(is_nan(fetched(equal.out, 65), 0), "a refused call has written");
}

void run() {
  constexpr int64_t kWhole = int64_t{4} << 30, kParts = 1;
  refusals();
  const AttentionShape grouped64{.heads = 32, .kv_heads = 8, .head_dim = 64},
      plain128{.heads = 8, .kv_heads = 8, .head_dim = 128}, grouped128{.heads = 8, .kv_heads = 2, .head_dim = 128},
      few{.heads = 4, .kv_heads = 2, .head_dim = 64};
  equal_documents(grouped64, 2, 193, kWhole);
  equal_documents(plain128, 3, 128, kWhole);
  equal_documents(grouped128, 2, 301, kWhole);
  equal_documents(grouped128, 1, 1030, kWhole);
  equal_documents(few, 5, 1, kWhole);
  equal_documents(few, 3, 7, kWhole);
  equal_documents(few, 4, 130, kParts);
  equal_documents(grouped128, 3, 77, kParts);
  for (const int64_t head_dim : {16, 32, 80, 96, 256})
    equal_documents({.heads = 4, .kv_heads = 2, .head_dim = head_dim}, 2, 150, kWhole);
  ragged_documents(grouped64, kWhole);
  ragged_documents(plain128, kWhole);
  ragged_documents(grouped128, kWhole);
  ragged_documents(grouped128, kParts);
  ragged_documents(grouped64, kParts);
  ragged_documents({.heads = 3, .kv_heads = 3, .head_dim = 64}, kParts);
}

}  // namespace
}  // namespace coda::test

int main() {
  try {
    coda::test::run();
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf(coda::test::failures == 0 ? "passed\n" : "%d failed\n", coda::test::failures);
  return coda::test::failures == 0 ? 0 : 1;
}
