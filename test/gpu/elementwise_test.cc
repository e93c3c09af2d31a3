// The second stage, embedding and the optimizer on the GPU against the CPU's or against loops in double. Needs a GPU of
// compute capability 9.0, libcoda and the GPU half; not part of `make test`. Prints "passed" last, or exits with 1.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "coda/cpu.h"
#include "coda/finish.h"
#include "coda/gpu.h"
#include "hopper/embedding.h"
#include "hopper/optimizer.h"
#include "llama/embedding.h"
#include "llama/packed_weight.h"

namespace coda::test {
namespace {

int failures = 0;
std::mt19937 random_bits(1);

/// Memory that both sides see, kept until the process ends, full of NaN.
template <class T>
T* managed(int64_t count) {
  void* p = nullptr;
  const size_t size = static_cast<size_t>(count + 1) * sizeof(T);
  if (cudaMallocManaged(&p, size) != cudaSuccess) {
    std::printf("cudaMallocManaged failed\n");
    std::exit(1);
  }
  cudaMemset(p, 0xff, size);
  cudaDeviceSynchronize();
  return static_cast<T*>(p);
}
template <class T>
Vector<T> vector(int64_t size) {
  return {managed<T>(size), size};
}
template <class T>
Matrix<T> matrix(int64_t rows, int64_t cols) {
  return {managed<T>(rows * (cols + 4)), rows, cols, cols + 4};
}
template <class T>
Matrix<T> random_matrix(int64_t rows, int64_t cols, float low, float high) {
  const Matrix<T> x = matrix<T>(rows, cols);
  std::uniform_real_distribution<float> value(low, high);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) x(i, j) = T(value(random_bits));
  return x;
}
template <class T>
Matrix<T> copy(const Matrix<T>& x) {
  const Matrix<T> y = matrix<T>(x.rows, x.cols);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j) y(i, j) = x(i, j);
  return y;
}

void expect(bool good, const char* what, int64_t i, int64_t j, double got, double want) {
  if (good) return;
  if (++failures < 20)
    std::printf("FAILED %s (%ld, %ld): %.9g, needs %.9g\n", what, static_cast<long>(i), static_cast<long>(j), got,
                want);
}
/// relative: of each element.
template <class T>
void expect_near(const char* what, const Matrix<T>& got, const Matrix<T>& want, double relative) {
  for (int64_t i = 0; i < got.rows; ++i)
    for (int64_t j = 0; j < got.cols; ++j) {
      const double a = static_cast<double>(got(i, j)), b = static_cast<double>(want(i, j));
      expect(a == b || std::fabs(a - b) <= relative * std::fabs(b) || (std::isnan(a) && std::isnan(b)), what, i, j, a,
             b);
    }
}
template <class T>
void expect_near(const char* what, const Vector<T>& got, const Vector<T>& want, double relative) {
  expect_near(what, Matrix<T>(got.data, 1, got.size), Matrix<T>(want.data, 1, want.size), relative);
}

constexpr double kOneRounding = 1.2e-7;

void test_finish(Cpu& cpu, const Gpu& gpu, int64_t slots, int64_t columns) {
  const Matrix<float> partial = random_matrix<float>(slots, columns, 0, 1);
  const Matrix<float> other = random_matrix<float>(slots, columns, -1, 1);
  const Matrix<MaxSum> states = matrix<MaxSum>(slots, columns);
  for (int64_t i = 0; i < slots; ++i)
    for (int64_t j = 0; j < columns; ++j) states(i, j) = {other(i, j) * 20, partial(i, j)};
  for (int64_t i = 0; i < slots; ++i) states(i, 0) = {-std::numeric_limits<float>::infinity(), 0};
  const int64_t width = 128 * slots - 28;
  Vector<float> got[6], want[6];
  for (int i = 0; i < 6; ++i) got[i] = vector<float>(columns), want[i] = vector<float>(columns);
  const auto run = [&](auto& engine, Vector<float>(&out)[6]) {
    inv_rms(engine, partial, width, 1e-5, out[0]);
    mean_inv_std(engine, other, partial, width, 1e-5, out[1], out[2]);
    mean_dot(engine, other, width, out[3]);
    total(engine, other, out[4]);
    log_sum_exp(engine, states, out[5]);
  };
  run(cpu, want);
  run(gpu, got);
  cudaDeviceSynchronize();
  const char* names[] = {"inv_rms", "mean", "inv_std", "mean_dot", "total", "log_sum_exp"};
  for (int i = 0; i < 6; ++i) expect_near(names[i], got[i], want[i], kOneRounding);
}

void test_embedding(Cpu& cpu, Gpu& gpu, int64_t vocabulary, int64_t tokens, int64_t d) {
  const Matrix<float> table = random_matrix<float>(vocabulary, d, -1, 1);
  const Matrix<bf16> d_h = random_matrix<bf16>(tokens, d, -1, 1);
  const Vector<int32_t> token = vector<int32_t>(tokens);
  // Half of the tokens are one: a long sum beside short ones.
  for (int64_t i = 0; i < tokens; ++i)
    token[i] = i % 2 == 0 ? 3 : static_cast<int32_t>(random_bits() % static_cast<uint32_t>(vocabulary));
  const llama::Stream<bf16> got{matrix<bf16>(tokens, d), vector<float>(tokens)};
  const llama::Stream<bf16> want{matrix<bf16>(tokens, d), vector<float>(tokens)};
  llama::embedding_forward<bf16>(cpu, table, token, 1e-5, want);
  hopper::embedding_forward(gpu, table, token, 1e-5, got);
  cudaDeviceSynchronize();
  expect_near("embedding h", got.h, want.h, 0);
  expect_near("embedding inv_rms", got.inv_rms, want.inv_rms, kOneRounding);

  const int64_t bytes = hopper::embedding_backward_workspace(gpu, tokens);
  gpu.set_workspace(managed<char>(bytes), bytes);
  for (const bool add : {true, false}) {
    const Matrix<float> d_table = copy(table), expected = copy(table);
    llama::embedding_backward<bf16>(cpu, d_h, token, expected, add);
    hopper::embedding_backward(gpu, d_h, token, d_table, add);
    cudaDeviceSynchronize();
    expect_near("embedding d_table", d_table, expected, 0);
  }
}

void test_optimizer(Gpu& gpu, int64_t rows, int64_t cols) {
  gpu.set_workspace(managed<char>(hopper::kSquaresWorkspace), hopper::kSquaresWorkspace);
  const Matrix<float> weight = random_matrix<float>(rows, cols, -1, 1),
                      folded = random_matrix<float>(rows, cols, -1, 1);
  const Matrix<float> gradient = random_matrix<float>(rows, cols, -1, 1),
                      gamma = random_matrix<float>(1, cols, 0.5f, 1.5f);
  const Matrix<float> moment1 = random_matrix<float>(rows, cols, -1, 1),
                      moment2 = random_matrix<float>(rows, cols, 0, 1);
  const Vector<const float> gammas(gamma.data, cols);

  const Matrix<float> d_gamma = matrix<float>(llama::unpack_slots(rows), cols);
  const Matrix<float> unfolded = copy(gradient);
  const Vector<float> all_d_gamma = vector<float>(cols);
  llama::unpack_gradient<float, float>(gpu, folded, {}, weight, gammas, unfolded, d_gamma, true);
  total(gpu, d_gamma, all_d_gamma);
  double* sum = managed<double>(1);
  double* norm = managed<double>(1);
  llama::AdamWStep* step = managed<llama::AdamWStep>(1);
  *sum = 0;
  *step = {.gradient_scale = 0,
           .decay = 0.99f,
           .beta1 = 0.9f,
           .beta2 = 0.95f,
           .step_size = 1e-2f,
           .inv_sqrt_correction = 2,
           .eps = 1e-8f};
  hopper::add_squares(gpu, unfolded, sum);
  hopper::clip_gradients(gpu, sum, 1, norm, step);
  const hopper::AdamWParameter parameter{.master = copy(weight),
                                         .moment1 = copy(moment1),
                                         .moment2 = copy(moment2),
                                         .gradient = unfolded,
                                         .gamma = gammas,
                                         .weight = matrix<bf16>(rows, cols)};
  hopper::adamw(gpu, parameter, step);
  cudaDeviceSynchronize();

  double squares = 0;
  for (int64_t j = 0; j < cols; ++j) {
    double column = 0, size = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double d = static_cast<double>(folded(i, j));
      const double g = static_cast<double>(gradient(i, j)) + d * static_cast<double>(gamma(0, j));
      column += d * static_cast<double>(weight(i, j));
      size += std::fabs(d * static_cast<double>(weight(i, j)));
      squares += static_cast<double>(unfolded(i, j)) * static_cast<double>(unfolded(i, j));
      expect(std::fabs(static_cast<double>(unfolded(i, j)) - g) < 1e-6, "unfolded", i, j,
             static_cast<double>(unfolded(i, j)), g);
    }
    expect(std::fabs(static_cast<double>(all_d_gamma[j]) - column) <= 1e-5 * size, "d_gamma", 0, j,
           static_cast<double>(all_d_gamma[j]), column);
  }
  expect(std::fabs(*sum - squares) <= 1e-12 * squares, "squares", 0, 0, *sum, squares);
  const double scale = std::min(1.0, 1 / (std::sqrt(squares) + 1e-6));
  expect(std::fabs(static_cast<double>(step->gradient_scale) - scale) <= 1e-6 * scale, "gradient_scale", 0, 0,
         static_cast<double>(step->gradient_scale), scale);
  const llama::OptimizerRows on_cpu = llama::optimizer_rows();
  for (int64_t i = 0; i < rows; ++i) {
    on_cpu.adamw(weight.row(i), moment1.row(i), moment2.row(i), unfolded.row(i), cols, *step);
    for (int64_t j = 0; j < cols; ++j) {
      const auto near = [&](const char* what, float got, float want, double bound) {
        const double a = static_cast<double>(got), b = static_cast<double>(want);
        expect(std::fabs(a - b) <= bound * (1 + std::fabs(b)), what, i, j, a, b);
      };
      near("moment1", parameter.moment1(i, j), moment1(i, j), 1e-6);
      near("moment2", parameter.moment2(i, j), moment2(i, j), 1e-6);
      near("master", parameter.master(i, j), weight(i, j), 1e-6);
      near("weight", parameter.weight(i, j), weight(i, j) * gamma(0, j), 1. / 256);
    }
  }

  // A norm that is not finite changes nothing.
  const Matrix<float> before = copy(parameter.master);
  *sum = std::numeric_limits<double>::infinity();
  hopper::clip_gradients(gpu, sum, 1, norm, step);
  hopper::adamw(gpu, parameter, step);
  cudaDeviceSynchronize();
  expect_near("after an infinite norm", parameter.master, before, 0);
}

}  // namespace
}  // namespace coda::test

int main() {
  using namespace coda;
  using namespace coda::test;
  Cpu cpu;
  Gpu gpu;
  for (const int64_t slots : {1, 5, 16, 48, 1002})
    for (const int64_t columns : {1, 31, 400}) test_finish(cpu, gpu, slots, columns);
  test_embedding(cpu, gpu, 50, 7, 33);
  test_embedding(cpu, gpu, 1000, 4096, 512);
  test_optimizer(gpu, 1, 128);
  test_optimizer(gpu, 130, 77);
  test_optimizer(gpu, 300, 512);
  if (failures > 0) {
    std::printf("%d failures\n", failures);
    return 1;
  }
  std::printf("passed\n");
}
