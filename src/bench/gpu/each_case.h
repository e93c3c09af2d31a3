// What is measured, case by case, into a report that grows.
#pragma once
#include <functional>
#include <vector>

#include "bench/gpu.h"
#include "coda/error.h"
#include "device.h"

namespace coda::bench {

/// report.results of run(product) for every case; where that throws an Error, with what it said. progress(report) before the first,
/// and after each.
template <class Report, class Run>
void for_each_case(const std::vector<GpuCase>& cases, Report& report,
                   const std::function<void(const Report&)>& progress, const Run& run) {
  progress(report);
  for (const GpuCase& product : cases) {
    try {
      report.results.push_back(run(product));
    } catch (const Error& error) {
      // The other cases can go on, unless the GPU cannot.
      check_cuda(cudaDeviceSynchronize(), error.what());
      report.results.push_back({.product = product, .failure = error.what()});
    }
    progress(report);
  }
}

}  // namespace coda::bench
