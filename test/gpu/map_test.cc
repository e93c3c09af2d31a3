// map on the GPU against the oracle, every element within its own bound: programs × shapes with tails × alignments × element
// types of the stored matrix, outputs poisoned with NaN, padding watched, results the same bits twice. Then the bandwidth of the
// two maps that a training step has. Needs a GPU of compute capability 9.0; not part of `make test`. Prints "passed" last, or
// exits with 1.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "coda/gpu.h"
#include "map_programs.h"
#include "oracle/oracle.h"
#include "verify/case.h"

namespace coda::hopper::mapped {
template <class P>
int launch_map(const detail::HopperMap& map);  // map_test_kernels.cu
}

namespace coda::test {
namespace {

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

/// Memory that both sides see, with a guard of NaN bits around every tensor.
class Memory {
 public:
  explicit Memory(bool aligned) : aligned_(aligned) {}

  /// Rows lie apart where unaligned, and begin at an odd element.
  template <class T>
  Matrix<T> matrix(int64_t rows, int64_t cols) {
    const int64_t stride = aligned_ ? (cols + 7) / 8 * 8 + 8 : cols + 3 + cols % 2;
    return {allocate<T>(rows * stride + 16) + (aligned_ ? 8 : 1), rows, cols, stride};
  }
  template <class T>
  Vector<T> vector(int64_t size) {
    const Matrix<T> row = matrix<T>(1, size);
    return {row.data, size};
  }
  /// All bytes, to see what has changed.
  std::vector<std::vector<char>> bytes() const {
    std::vector<std::vector<char>> out;
    for (const Block& block : blocks_) out.emplace_back(block.data.get(), block.data.get() + block.size);
    return out;
  }
  void restore(const std::vector<std::vector<char>>& bytes) {
    for (size_t i = 0; i < blocks_.size(); ++i) std::memcpy(blocks_[i].data.get(), bytes[i].data(), bytes[i].size());
  }
  /// Where p lies in a block; −1 for another's memory.
  int64_t offset(size_t block, const void* p) const {
    const int64_t at = static_cast<const char*>(p) - blocks_[block].data.get();
    return at >= 0 && at < static_cast<int64_t>(blocks_[block].size) ? at : -1;
  }

 private:
  struct Free {
    void operator()(char* p) const { cudaFree(p); }
  };
  struct Block {
    std::unique_ptr<char, Free> data;
    size_t size;
  };
  template <class T>
  T* allocate(int64_t count) {
    void* p = nullptr;
    const size_t size = static_cast<size_t>(count) * sizeof(T);
    check(cudaMallocManaged(&p, size), "cudaMallocManaged");
    std::memset(p, 0xff, size);
    blocks_.push_back({std::unique_ptr<char, Free>(static_cast<char*>(p)), size});
    return static_cast<T*>(p);
  }

  bool aligned_;
  std::vector<Block> blocks_;
};

std::mt19937 random_bits(1);

/// Of eight bits each: products of two are exact, and nothing that CrossEntropy rounds lies between two roundings by
/// accident.
template <class T>
void randomize(const Matrix<T>& x, float low, float high) {
  std::uniform_real_distribution<float> value(low, high);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j) x(i, j) = T(static_cast<float>(bf16(value(random_bits))));
}
template <class T>
void randomize(const Vector<T>& x, float low, float high) {
  randomize(Matrix<T>(x.data, 1, x.size), low, high);
}

template <class P, int I>
void fill(auto& field, Memory& memory, int64_t m, int64_t n) {
  using Info = coda::detail::field_info<P, I>;
  constexpr Kind kind = Info::kind;
  constexpr int64_t extent = std::max(1, Info::extent);
  using F = std::remove_cvref_t<decltype(field)>;
  if constexpr (Info::direction == Direction::local || kind == Kind::off) {
  } else if constexpr (kind == Kind::number) {
    if constexpr (std::is_same_v<F, float>) field = 1e-5f;
    if constexpr (std::is_same_v<F, int32_t>) field = static_cast<int32_t>(n / 32 * 16);
    if constexpr (std::is_same_v<F, SoftCapped>) field = {3.f};
  } else if constexpr (kind == Kind::scalar) {
    field = 1.5f;
  } else if constexpr (kind == Kind::device_scalar) {
    const Vector<float> value = memory.vector<float>(1);
    value[0] = 0.75f;
    field = value.data;
  } else if constexpr (kind == Kind::per_row || kind == Kind::per_col || kind == Kind::per_pair) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(field.data)>>;
    const int64_t pairs = n / 2, period = pairs % 24 == 0 ? 24 : pairs % 16 == 0 ? pairs / 2 : pairs;
    const Vector<T> x = memory.vector<T>(kind == Kind::per_row ? m : kind == Kind::per_col ? n : period);
    if constexpr (std::is_integral_v<T>)
      randomize(x, 0, static_cast<float>(n));
    else if constexpr (kind == Kind::per_pair)
      randomize(x, 0, 1e-3f);
    else
      randomize(x, 0.5f, 1.5f);
    field = x;
  } else {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(field.data)>>;
    int64_t rows = m, cols = n;
    if constexpr (kind == Kind::half_tile) cols = n / 2;
    if constexpr (kind == Kind::double_tile) cols = 2 * n;
    if constexpr (kind == Kind::row_sum || kind == Kind::row_max || kind == Kind::row_log_sum_exp)
      rows = (n + extent - 1) / extent, cols = m;
    if constexpr (kind == Kind::col_sum) rows = (m + extent - 1) / extent;
    const Matrix<T> x = memory.matrix<T>(rows, cols);
    if constexpr (Info::direction == Direction::in || kind == Kind::accumulate) randomize(x, -1, 1);
    field = x;
  }
}

template <class P>
P make_program(Memory& memory, int64_t m, int64_t n) {
  P program{};
  coda::detail::with_fields<coda::detail::field_count<P>>(program, [&](auto&... field) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (fill<P, I>(field, memory, m, n), ...);
    }
    (std::make_integer_sequence<int, sizeof...(field)>{});
  });
  return program;
}

template <class P, class X>
void run(const Matrix<X>& x, const P& program) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  coda::detail::with_program(program, [&](const coda::detail::ProgramInfo& info) {
    check(hopper::mapped::launch_map<P>({.x = coda::detail::factor(x),
                                         .operands = info.operands,
                                         .program = &program,
                                         .stream = nullptr,
                                         .multiprocessors = multiprocessors}),
          "launch_map");
  });
}

int failures = 0, comparisons = 0;

/// Value (i, j) of an output, as the oracle tells it: of a MaxSum the log-sum-exp.
double stored(const coda::detail::Operand& operand, int64_t i, int64_t j) {
  const int64_t at = i * operand.stride + j;
  switch (operand.field.element) {
    case ElementType::bfloat16:
      return static_cast<double>(static_cast<const bf16*>(operand.data)[at]);
    case ElementType::max_sum: {
      const MaxSum& state = static_cast<const MaxSum*>(operand.data)[at];
      return static_cast<double>(state.max) + std::log(static_cast<double>(state.sum));
    }
    default:
      return static_cast<double>(static_cast<const float*>(operand.data)[at]);
  }
}

/// Every element is held to its own bound, of what a GPU may round on the way to it.
void compare(const std::string& where, const coda::detail::Operand& operand,
             const oracle::Output<verify::Bounded>& expected) {
  double worst = 0, got = 0;
  verify::Bounded wanted(0.0);
  int64_t row = -1, col = -1;
  for (int64_t i = 0; i < operand.rows; ++i)
    for (int64_t j = 0; j < operand.cols; ++j) {
      const double value = stored(operand, i, j),
                   share = verify::share(value, expected.value(i, j), operand.field.element);
      if (share <= worst) continue;
      worst = share;
      row = i, col = j, got = value, wanted = expected.value(i, j);
    }
  ++comparisons;
  if (worst <= 1) return;
  ++failures;
  std::printf("FAILED %s, %s: (%ld, %ld) is %.9g, needs %.9g (%.3g times the bound)\n", where.c_str(),
              std::string(operand.field.name).c_str(), static_cast<long>(row), static_cast<long>(col), got,
              wanted.value, worst);
}

int64_t size_of(ElementType element) {
  return element == ElementType::bfloat16 ? 2 : element == ElementType::max_sum ? 8 : 4;
}

/// What no output covers must be as it was.
bool untouched(const Memory& memory, const std::vector<std::vector<char>>& before,
               std::span<const coda::detail::Operand> operands) {
  std::vector<std::vector<char>> after = memory.bytes();
  for (size_t block = 0; block < after.size(); ++block)
    for (const coda::detail::Operand& operand : operands) {
      if (operand.field.direction != Direction::out || operand.data == nullptr) continue;
      const int64_t offset = memory.offset(block, operand.data), size = size_of(operand.field.element);
      if (offset < 0) continue;
      for (int64_t i = 0; i < operand.rows; ++i) {
        const int64_t row = offset + i * operand.stride * size;
        std::memcpy(&after[block][static_cast<size_t>(row)], &before[block][static_cast<size_t>(row)],
                    static_cast<size_t>(operand.cols * size));
      }
    }
  return after == before;
}

enum class Place { apart, in_place };

template <class P, class X>
void test_case(const char* name, int64_t m, int64_t n, bool aligned, Place place) {
  const std::string where = std::string(name) + " of " + (sizeof(X) == 2 ? "bf16 " : "float ") + std::to_string(m) +
                            "x" + std::to_string(n) + (aligned ? "" : " unaligned") +
                            (place == Place::in_place ? " in place" : "");
  Memory memory(aligned);
  const Matrix<X> x = memory.matrix<X>(m, n);
  randomize(x, -2, 2);
  P program = make_program<P>(memory, m, n);
  if (place == Place::in_place) {
    if constexpr (requires { program.d_qkv = x; }) program.d_qkv = x;
    if constexpr (requires { program.d_logits = x; }) program.d_logits = x;
  }
  const auto expected = oracle::map<verify::Bounded>(x, program);
  const auto before = memory.bytes();
  run(x, program);
  check(cudaDeviceSynchronize(), where.c_str());
  const auto once = memory.bytes();
  coda::detail::with_program(program, [&](const coda::detail::ProgramInfo& info) {
    for (const coda::detail::Operand& operand : info.operands)
      if (operand.field.direction == Direction::out && operand.data != nullptr)
        compare(where, operand, expected[operand.field.name]);
    if (!untouched(memory, before, info.operands)) {
      ++failures;
      std::printf("FAILED %s: something else was written\n", where.c_str());
    }
  });
  memory.restore(before);
  run(x, program);
  check(cudaDeviceSynchronize(), where.c_str());
  if (memory.bytes() != once) {
    ++failures;
    std::printf("FAILED %s: a second run has other bits\n", where.c_str());
  }
}

template <class P>
void test_program(const char* name) {
  // Rows: below, at and past a step, a strip and a slot of column sums. Columns: the same of chunks; pairs need
  // multiples of 16 and double tiles of 8.
  constexpr bool kPairs = takes_pairs<P>;
  const int64_t rows[] = {1, 3, 4, 70, 133};
  const int64_t pair_cols[] = {16, 48, 128, 400, 1168}, double_cols[] = {8, 72, 128, 392, 1160},
                cols[] = {1, 77, 128, 390, 1155};
  bool doubles = false;
  for (const Field& field : describe<P>()) doubles = doubles || field.kind == Kind::double_tile;
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 5; ++j) {
      const int64_t n = (kPairs ? pair_cols : doubles ? double_cols : cols)[j];
      for (const bool aligned : {true, false}) {
        test_case<P, bf16>(name, rows[i], n, aligned, Place::apart);
        test_case<P, float>(name, rows[i], n, aligned, Place::apart);
        test_case<P, bf16>(name, rows[i], n, aligned, Place::in_place);
      }
    }
  std::printf("%s: done\n", name);
}

/// bytes: what one run reads and writes.
template <class P>
void bandwidth(const char* name, const Matrix<bf16>& x, const P& program, double bytes) {
  constexpr int kRuns = 20;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  run(x, program);
  check(cudaEventRecord(begin), "cudaEventRecord");
  for (int i = 0; i < kRuns; ++i) run(x, program);
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaEventSynchronize(end), name);
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  std::printf("%s [%ld, %ld]: %.3f ms, %.0f GB/s\n", name, static_cast<long>(x.rows), static_cast<long>(x.cols),
              static_cast<double>(ms) / kRuns, bytes * kRuns / static_cast<double>(ms) * 1e-6);
}

/// Zeros in memory of the device, kept until the process ends.
template <class T>
T* zeros(int64_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  check(cudaMemset(p, 0, static_cast<size_t>(count) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(p);
}

void measure() {
  {
    const int64_t m = 16384, n = 6144;
    const Matrix<bf16> x(zeros<bf16>(m * n), m, n);
    const RopeBackward<Tensors<bf16>> program{.inv_rms = {zeros<float>(m), m},
                                              .position = {zeros<int32_t>(m), m},
                                              .turns_high = {zeros<float>(n / 2), n / 2},
                                              .turns_low = {zeros<float>(n / 2), n / 2},
                                              .qkv = {zeros<bf16>(m * n), m, n},
                                              .d_qkv = {zeros<bf16>(m * n), m, n},
                                              .dot = {zeros<float>(n / 128 * m), n / 128, m}};
    bandwidth("RopeBackward", x, program, static_cast<double>(m * n) * 6);
  }
  {
    const int64_t m = 4096, n = 128256;
    const Matrix<bf16> x(zeros<bf16>(m * n), m, n);
    const CrossEntropyBackward<Tensors<bf16>> program{.inv_rms = {zeros<float>(m), m},
                                                      .label = {zeros<int32_t>(m), m},
                                                      .log_sum_exp = {zeros<float>(m), m},
                                                      .d_log_sum_exp = {zeros<float>(m), m},
                                                      .d_label_logit = {zeros<float>(m), m},
                                                      .maxima = {zeros<float>(n / 128 * m), n / 128, m},
                                                      .d_logits = x,
                                                      .dot = {zeros<float>(n / 128 * m), n / 128, m}};
    bandwidth("CrossEntropyBackward in place", x, program, static_cast<double>(m * n) * 4);
  }
}

}  // namespace
}  // namespace coda::test

int main() {
  using namespace coda;
  using namespace coda::test;
  const verify::Assume arithmetic(verify::kHopperArithmetic);
#define CODA_TEST(...) test_program<__VA_ARGS__>(#__VA_ARGS__);
  CODA_MAP_TEST_PROGRAMS(CODA_TEST)
  std::printf("%d outputs compared, %d failures\n", comparisons, failures);
  measure();
  if (failures > 0) return 1;
  std::printf("passed\n");
}
