// How the GPU engine behaves towards its caller: streams, CUDA graphs, the current device, the workspace, matrices of more than 2^31
// elements. Needs a GPU of compute capability 9.0; not part of `make test`. Prints "passed" last, or exits with 1.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "coda/finish.h"
#include "coda/gpu.h"
#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "hopper/plan.h"
#include "hopper/product.h"

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
template <class T>
T* allocate(int64_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
  check(cudaMemset(p, 0xff, static_cast<size_t>(count) * sizeof(T)));
  return static_cast<T*>(p);
}
Matrix<bf16> tile(int64_t rows, int64_t cols) {
  return {allocate<bf16>(rows * cols), rows, cols};
}
void fill(const Matrix<bf16>& x, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bf16> values(static_cast<size_t>(x.rows * x.cols));
  for (bf16& v : values) v = bf16(static_cast<float>(random() % 2001) / 1000.f - 1.f);
  check(cudaMemcpy(x.data, values.data(), values.size() * sizeof(bf16), cudaMemcpyHostToDevice));
}
template <class T>
std::vector<T> host(const T* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  check(cudaMemcpy(values.data(), data, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// h = a Woᵀ + residual, r = 1/rms(h), y = swiglu(r ⊙ h Wᵀ): three launches that depend on each other.
struct Block {
  static constexpr int64_t kTokens = 1000, kWidth = 512, kFfn = 768;
  Matrix<bf16> a = tile(kTokens, kWidth), wo = tile(kWidth, kWidth), w = tile(2 * kFfn, kWidth),
               residual = tile(kTokens, kWidth), h = tile(kTokens, kWidth), y = tile(kTokens, kFfn);
  Matrix<float> sum_sq{allocate<float>(kWidth / 128 * kTokens), kWidth / 128, kTokens};
  Vector<float> inv_rms{allocate<float>(kTokens), kTokens};

  void inputs(unsigned seed) const {
    fill(a, seed);
    fill(residual, seed + 1);
  }
  void run(const Gpu& gpu) const {
    gemm(gpu, a, wo, Residual<>{.residual = residual, .gamma = {}, .h = h, .x = {}, .sum_sq = sum_sq});
    coda::inv_rms(gpu, sum_sq, kWidth, 1e-5, inv_rms);
    gemm(gpu, h, w, RmsNormSwiGlu<Tensors<bf16>, DropGateUp>{.f = {}, .inv_rms = inv_rms, .gate_up = {}, .y = y});
  }
  std::vector<bf16> result() const { return host(y.data, kTokens * kFfn); }
};

void streams_and_graphs() {
  Block block;
  fill(block.wo, 5);
  fill(block.w, 6);
  const Gpu plain;
  std::vector<std::vector<bf16>> want;
  for (unsigned seed : {10U, 20U}) {
    block.inputs(seed);
    block.run(plain);
    check(cudaDeviceSynchronize());
    want.push_back(block.result());
  }
  expect(!same(want[0], want[1]), "other inputs give the same result");

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Gpu gpu(stream);
  block.inputs(10);
  // Copies and fills may still be under way, and a stream that does not block does not wait for them.
  check(cudaDeviceSynchronize());
  block.run(gpu);
  check(cudaStreamSynchronize(stream));
  expect(same(block.result(), want[0]), "another stream, another result");

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  block.run(gpu);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  const unsigned seeds[] = {20, 10, 20};
  for (unsigned seed : seeds) {
    block.inputs(seed);
    check(cudaMemset(block.y.data, 0xff, static_cast<size_t>(block.y.rows * block.y.cols) * sizeof(bf16)));
    check(cudaDeviceSynchronize());
    check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
    expect(same(block.result(), want[seed == 10 ? 0 : 1]), "a replayed graph gives another result");
  }
}

void current_device() {
  int count = 0, now = -1;
  check(cudaGetDeviceCount(&count));
  if (count < 2) {
    std::printf("one GPU only: that another device may be current is not tried\n");
    return;
  }
  check(cudaSetDevice(1));
  Block block;
  const Gpu gpu(nullptr, 1);
  check(cudaSetDevice(0));
  block.run(gpu);
  check(cudaGetDevice(&now));
  expect(now == 0, "a call has changed the current device");
  check(cudaSetDevice(1));
  check(cudaDeviceSynchronize());
  check(cudaSetDevice(0));
}

void workspace() {
  Gpu gpu;
  const Matrix<bf16> a = tile(200, 128), b = tile(136, 128);
  const Matrix<bf16> memory = tile(200, 200), odd(memory.data + 1, 200, 136, 200);
  fill(a, 1);
  fill(b, 2);
  const Store<> store{.out = odd};
  const int64_t bytes = gemm_workspace(a, b, store);
  expect(bytes > 0, "an output that is not aligned asks for no workspace");
  try {
    gemm(gpu, a, b, store);
    expect(false, "a missing workspace is not refused");
  } catch (const OperandError& error) {
    expect(error.operand() == "workspace" &&
               error.needs().find("out is not at a multiple of 16 bytes") != std::string::npos,
           std::string("the refusal says: ") + error.what());
  }
  gpu.set_workspace(allocate<char>(bytes), bytes);
  gemm(gpu, a, b, store);
  const Matrix<bf16> aligned = tile(200, 136);
  gemm(gpu, a, b, Store<>{.out = aligned});
  check(cudaDeviceSynchronize());
  const auto in_two = host(memory.data, 200 * 200), fused = host(aligned.data, 200 * 136);
  bool equal = true;
  for (int64_t i = 0; i < 200; ++i)
    for (int64_t j = 0; j < 136; ++j)
      equal =
          equal && in_two[static_cast<size_t>(i * 200 + 1 + j)].bits == fused[static_cast<size_t>(i * 136 + j)].bits;
  expect(equal, "two passes give another result than one");
}

/// Slices of the depth beside whole ones: the values of float sums in another order, and the same bits each time.
void slices_of_depth() {
  constexpr int64_t kM = 300, kN = 520, kK = 64 * 13 + 8;
  const Matrix<bf16> a = tile(kK, kM + 4), b = tile(kK, kN);
  fill(a, 5);
  fill(b, 6);
  const Matrix<bf16> rows_of_a(a.data, kK, kM, kM + 4);
  const Matrix<float> whole{allocate<float>(kM * kN), kM, kN}, sliced{allocate<float>(kM * kN), kM, kN};
  Gpu gpu;
  gemm(gpu, transpose(rows_of_a), transpose(b), Store<Tensors<bf16>, float>{.out = whole});
  check(cudaDeviceSynchronize());
  const auto want = host(whole.data, kM * kN);
  for (const int count : {2, 3, 13, 14, 1000}) {
    const Store<Tensors<bf16>, float> store{.out = sliced};
    const int64_t bytes = gemm_workspace(transpose(rows_of_a), transpose(b), store, {count});
    gpu.set_workspace(allocate<char>(bytes), bytes);
    std::vector<float> first;
    for (int run = 0; run < 3; ++run) {
      check(cudaMemset(sliced.data, 0xff, kM * kN * sizeof(float)));
      check(cudaMemset(gpu.workspace(), 0xff, static_cast<size_t>(bytes)));
      gemm(gpu, transpose(rows_of_a), transpose(b), store, {count});
      check(cudaDeviceSynchronize());
      const auto got = host(sliced.data, kM * kN);
      if (run == 0) first = got;
      expect(same(got, first), std::to_string(count) + " slices give other bits another time");
    }
    double worst = 0;
    for (size_t i = 0; i < want.size(); ++i)
      worst = std::max(worst, static_cast<double>(std::fabs(first[i] - want[i])));
    // Sums of 840 products of at most 1.
    expect(worst < 1e-4, std::to_string(count) + " slices are off by " + std::to_string(worst));
    gpu.set_workspace(nullptr, 0);
  }
  try {
    gemm(gpu, transpose(rows_of_a), transpose(b), Store<Tensors<bf16>, float>{.out = sliced}, {4});
    expect(false, "slices without a workspace are not refused");
  } catch (const OperandError& error) {
    expect(error.operand() == "workspace" && error.needs().find("4 slices") != std::string::npos, error.what());
  }
}

void many_elements() {
  constexpr int64_t kM = 40000, kN = 65536, kK = 64;
  const Gpu gpu;
  const Matrix<bf16> a = tile(kM, kK), b = tile(kN, kK), out = tile(kM, kN);
  fill(a, 3);
  fill(b, 4);
  gemm(gpu, a, b, Store<>{.out = out});
  check(cudaDeviceSynchronize());
  const auto rows_of_a = host(a.data, kM * kK), rows_of_b = host(b.data, kN * kK);
  std::mt19937_64 random(1);
  for (int sample = 0; sample < 2000; ++sample) {
    const int64_t i = sample == 0 ? kM - 1 : static_cast<int64_t>(random() % kM),
                  j = sample == 0 ? kN - 1 : static_cast<int64_t>(random() % kN);
    double want = 0;
    for (int64_t k = 0; k < kK; ++k)
      want += static_cast<double>(float(rows_of_a[static_cast<size_t>(i * kK + k)])) *
              static_cast<double>(float(rows_of_b[static_cast<size_t>(j * kK + k)]));
    const double got = static_cast<double>(float(host(out.row(i) + j, 1)[0]));
    expect(std::fabs(got - want) <= std::fabs(want) * 0x1p-8 + 1e-4,
           "row " + std::to_string(i) + ", column " + std::to_string(j) + " of 2^31 and more is " +
               std::to_string(got) + ", needs " + std::to_string(want));
  }
}

/// judge(plan, result) of a·bᵀ into `out`, poisoned, by each plan of Store's.
void by_every_plan(const Matrix<bf16>& a, const Matrix<bf16>& b, const Matrix<bf16>& out, const auto& judge) {
  const Gpu gpu;
  const auto factor_a = coda::detail::factor(a), factor_b = coda::detail::factor(b);
  const int64_t count = out.rows * out.cols;
  const Store<> store{.out = out};
  coda::detail::with_program(store, [&](const coda::detail::ProgramInfo& program) {
    const hopper::Problem problem = hopper::problem_of(factor_a, factor_b, program, gpu.multiprocessors());
    for (const hopper::Candidate& c :
         hopper::candidates(problem, coda::detail::hopper_kernels<Store<Tensors<bf16>>>())) {
      const hopper::Plan plan{.kernel = c.kernel, .band = c.band};
      check(cudaMemset(out.data, 0xff, static_cast<size_t>(count) * sizeof(bf16)));
      hopper::run_fused(gpu, factor_a, factor_b, program, plan);
      judge(plan, host(out.data, count));
    }
  });
}

/// 19 rows and 11 columns of clusters (128 columns wide), the last ones not whole: bands of 8, 4 and 2 that are not full, in
/// several waves. Every element is written once, wherever its tile comes.
void orders_of_tiles() {
  constexpr int64_t kM = 18 * 256 + 40, kN = 10 * 128 + 24, kK = 128;
  const Gpu gpu;
  const Matrix<bf16> a = tile(kM, kK), b = tile(kN, kK);
  fill(a, 3);
  fill(b, 4);
  const Matrix<bf16> plain = tile(kM, kN);
  gemm(gpu, a, b, Store<>{.out = plain});
  const auto want = host(plain.data, kM * kN);
  by_every_plan(a, b, tile(kM, kN), [&](const hopper::Plan& plan, const std::vector<bf16>& got) {
    expect(same(got, want), hopper::text_of(plan.kernel->tile, plan.band) + " gives another result");
  });
}

/// Depths at which clusters of wide tiles wait for each other, in more than one wave: every tile and band gives the bits of a pingpong tile,
/// whose clusters do not, and so do products that run at the same time and take each other's pace for theirs.
void deep_products() {
  constexpr int64_t kM = 4096 + 40, kN = 1280 + 24, kK = 8200;
  constexpr int kStreams = 3, kRuns = 10;
  const Matrix<bf16> a = tile(kM, kK), b = tile(kN, kK);
  fill(a, 7);
  fill(b, 8);
  std::vector<bf16> want;
  hopper::Plan wide;
  bool pingpong = false;
  by_every_plan(a, b, tile(kM, kN), [&](const hopper::Plan& plan, const std::vector<bf16>& got) {
    if (want.empty()) want = got;
    expect(same(got, want), "deep: " + hopper::text_of(plan.kernel->tile, plan.band) + " gives another result");
    if (plan.kernel->tile == coda::detail::HopperTile::pingpong_128x128)
      pingpong = true;
    else
      wide = plan;
  });
  expect(pingpong && wide.kernel != nullptr, "Store has not both kinds of tiles");
  std::vector<Matrix<bf16>> outputs;
  std::vector<cudaStream_t> streams(kStreams);
  for (cudaStream_t& stream : streams) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    outputs.push_back(tile(kM, kN));
  }
  check(cudaDeviceSynchronize());
  const auto factor_a = coda::detail::factor(a), factor_b = coda::detail::factor(b);
  for (int run = 0; run < kRuns; ++run)
    for (size_t i = 0; i < kStreams; ++i) {
      const Store<> store{.out = outputs[i]};
      coda::detail::with_program(store, [&](const coda::detail::ProgramInfo& program) {
        hopper::run_fused(Gpu(streams[i]), factor_a, factor_b, program, wide);
      });
    }
  check(cudaDeviceSynchronize());
  for (const Matrix<bf16>& out : outputs)
    expect(same(host(out.data, kM * kN), want), "deep products side by side give another result");
}

}  // namespace
}  // namespace coda::test

int main() {
  coda::test::streams_and_graphs();
  coda::test::current_device();
  coda::test::workspace();
  coda::test::orders_of_tiles();
  coda::test::slices_of_depth();
  coda::test::deep_products();
  coda::test::many_elements();
  if (coda::test::failures > 0) return 1;
  std::printf("passed\n");
}
