// What coda bench --device cuda says: a table for each hidden size, means beside their bars, and JSON with every round.
#pragma once
#include <string>

#include "gpu.h"

namespace coda::bench {

/// coda's time over that of cuBLAS, or over that of cublasLt's fastest: median over the rounds' own ratios. NaN without times.
double to_cublas(const GpuRegime& regime);
double to_best(const GpuRegime& regime);

/// Geometric means of a row's ratios over its shapes and hidden sizes.
struct GpuMean {
  const GpuRow* row;
  int cases = 0;
  double sustained = 0, cool = 0;            // over cuBLAS
  double sustained_best = 0, cool_best = 0;  // over cublasLt's fastest
  double worst = 0;                          // the largest sustained ratio of a single shape, over cuBLAS
};
/// Of the rows that were timed, in their order.
std::vector<GpuMean> gpu_means(const GpuReport& report);

std::string text_of(const GpuMachine& machine);
/// The head of the table of one hidden size.
std::string gpu_table_head(const GpuReport& report, int64_t hidden);
/// A line of times, and one of errors.
std::string text_of(const GpuResult& result);
/// The means beside their bars; empty if nothing was timed.
std::string gpu_means_table(const GpuReport& report);

std::string json_of(const GpuReport& report);

}  // namespace coda::bench
