// libcoda_bench.so: coda's side of the comparison with PyTorch on a GPU, as C functions that Python's ctypes calls. Tensors are
// PyTorch's, on its current device, in its own layouts; weights and labels are copied when a case is opened, everything else must stay
// until it is closed. One thread at a time.
#include <cuda_runtime_api.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/torch/case.h"

namespace {

using coda::bench::Case;

std::string trouble;
std::vector<std::unique_ptr<Case>> cases;
std::optional<coda::Gpu> gpu;  // of the last run's stream

constexpr int kNoSuchCase = -1, kFailed = -2;

/// body()'s result, or kFailed and what it has thrown in trouble.
template <class Body>
int reported(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    trouble = error.what();
    return kFailed;
  }
}

Case& opened(int handle) {
  const auto index = static_cast<size_t>(handle);
  if (handle < 0 || index >= cases.size() || cases[index] == nullptr)
    throw coda::UsageError(std::to_string(handle) + " is not the handle of an open case");
  return *cases[index];
}

}  // namespace

extern "C" {

/// A handle from 0; −1: there is no such case; another negative number: coda_bench_error() says what is wrong.
int coda_bench_open(const char* name, int d, int n, const char* const* names, void* const* tensors) {
  trouble.clear();
  return reported([&] {
    coda::bench::Inputs inputs;
    for (int i = 0; i < n; ++i) inputs.add(names[i], tensors[i]);
    std::unique_ptr<Case> made = coda::bench::make_product_case(name, d, inputs);
    if (made == nullptr) made = coda::bench::make_block_case(name, d, inputs);
    if (made == nullptr) return kNoSuchCase;
    coda::bench::check_cuda(cudaDeviceSynchronize(), "opening a case");
    cases.push_back(std::move(made));
    return static_cast<int>(cases.size()) - 1;
  });
}

/// Enqueues launches, one after another. Nothing waits, and nothing is allocated but a Gpu for a stream that is not the last one.
/// What goes wrong is said by the next coda_bench_result.
void coda_bench_run(int handle, int launches, void* stream) {
  reported([&] {
    auto* const on = static_cast<cudaStream_t>(stream);
    if (!gpu || gpu->stream() != on) gpu.emplace(on);
    for (int i = 0; i < launches; ++i) opened(handle).run(*gpu);
    return 0;
  });
}

/// An output of the last launch, unpacked into a tensor of PyTorch's shape; 0, or a negative number.
int coda_bench_result(int handle, const char* name, void* out) {
  return reported([&] {
    if (!trouble.empty()) throw coda::Error(std::string(trouble));
    coda::bench::check_cuda(cudaDeviceSynchronize(), "running a case");
    opened(handle).result(name, out);
    coda::bench::check_cuda(cudaDeviceSynchronize(), "a case's result");
    return 0;
  });
}

const char* coda_bench_error() {
  return trouble.c_str();
}

void coda_bench_close(int handle) {
  reported([&] {
    opened(handle);
    cases[static_cast<size_t>(handle)] = nullptr;
    return 0;
  });
}

}  // extern "C"
