// coda bench --device cuda: fused programs on a GPU beside cuBLAS' plain products of the same shapes, in one process. What is here
// needs no GPU: what is measured, and what comes out of it. bench/gpu/ measures.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "contest.h"
#include "library.h"

namespace coda::bench {

/// What a row runs.
enum class Fused {
  store,
  store_float,
  accumulate,
  residual,
  residual_rms,
  swiglu,
  swiglu_keep,
  rope,
  loss,
  loss_keep,
  swiglu_backward,
  norm_backward,
  softmax_gradient,
};

/// A size of a product as a multiple of the model's: d, 3d, F, 2F, and two vocabularies.
enum class Extent { d, d3, f, f2, v32768, v128256 };

/// One line of the table of what the GPU engine has to show.
struct GpuRow {
  std::string_view name;     // as the command line takes it
  std::string_view program;  // "ResidualRms"
  Fused fused;
  Form form;
  double sustained_bar, cool_bar;  // coda's time over cuBLAS', geometric mean over hidden sizes and shapes
  std::vector<std::pair<Extent, Extent>> shapes;  // N × K beside M = tokens; of the form NT M × N beside K = tokens
};
const std::vector<GpuRow>& gpu_rows();

/// 8/3 of the hidden size, rounded up to a multiple of 256.
int64_t gpu_ffn(int64_t hidden);

struct GpuOptions {
  std::vector<int64_t> hidden = {2048, 4096, 8192};
  int64_t tokens = 16384;
  std::vector<std::string> rows;  // names; none: all
  int rounds = 9;                 // sustained
  int cool_rounds = 3;
  double warm_seconds = 3;  // of load before a case's first round
  int slices = 1;           // coda's products in so many of the depth (coda::DepthSlices); 0: as depth_slices predicts
};

/// One product: a row at one of its shapes.
struct GpuCase {
  const GpuRow* row;
  int64_t hidden, m, n, k;
  int slices = 1;

  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
};
/// In the order of hidden sizes, then of rows. Throws UsageError that names a row there is not, and those there are.
std::vector<GpuCase> gpu_cases(const GpuOptions& options);

/// The relative Frobenius error of one output against float64 on sampled rows.
struct OutputError {
  std::string name;
  double coda;
  double bf16_path;  // of a bf16 product and the operation in bf16 behind it (bf16_path.h)
};

/// One contestant's times in one regime, with the card's state while each round ran; NaN where NVML is not there.
struct GpuTimes {
  std::string name;
  Time time;
  std::vector<double> mhz, watts;
};

/// coda, cuBLAS by its default heuristic, and the fastest of cublasLt's suggestions: in this order.
using GpuRegime = std::vector<GpuTimes>;

struct GpuResult {
  GpuCase product;
  std::string failure;  // why it was not timed; otherwise empty
  std::vector<OutputError> errors;
  int suggestions = 0, best_suggestion = 0;  // of cublasLt: how many, and the number of the fastest
  GpuRegime sustained, cool;
};

struct GpuMachine {
  std::string gpu, driver, cuda, cublas;
  std::string nvml;  // why clocks and power are unknown; otherwise empty
  double power_limit_watts = 0, top_mhz = 0;
};

struct GpuReport {
  GpuMachine machine;
  GpuOptions options;
  std::vector<GpuResult> results;
};

/// Measures everything that options ask for. progress sees the report when the machine is known, and after each case. Throws
/// DeviceError where there is no Hopper GPU, Error where there is no cuBLAS. Defined in the GPU half: null where it is not
/// linked in.
[[gnu::weak]] GpuReport bench_gpu(const GpuOptions& options, const std::function<void(const GpuReport&)>& progress);

}  // namespace coda::bench
