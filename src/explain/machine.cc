#include "explain/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/programs/store.h"

namespace coda::explain {
namespace {

double best_seconds(int runs, const std::function<void()>& run) {
  run();  // pages, and the micro-kernel's code
  double best = INFINITY;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

template <class E>
double product_rate(Cpu& cpu, int64_t size) {
  const auto count = static_cast<size_t>(size * size);
  std::vector<E> a(count, E(0.5f)), b(count, E(0.25f)), out(count);
  const Matrix<const E> x(a.data(), size, size), w(b.data(), size, size);
  const Store<Tensors<E>> store{.out = Matrix<E>(out.data(), size, size)};
  const double seconds = best_seconds(3, [&] { gemm(cpu, x, w, store); });
  return 2.0 * std::pow(static_cast<double>(size), 3) / seconds;
}

double triad_rate(Cpu& cpu, int64_t floats) {
  const auto count = static_cast<size_t>(floats);
  std::vector<float> a(count), b(count, 1.f), c(count, 2.f);
  const int64_t parts = cpu.threads();
  const double seconds = best_seconds(3, [&] {
    cpu.parallel_for(parts, [&](int64_t part, int) {
      for (int64_t i = floats * part / parts; i < floats * (part + 1) / parts; ++i) a[i] = b[i] + 3.f * c[i];
    });
  });
  return 3.0 * static_cast<double>(floats) * sizeof(float) / seconds;
}

void check_rate(const char* flag, const std::optional<double>& rate) {
  if (rate && !(*rate > 0 && std::isfinite(*rate)))
    throw UsageError(fmt::format("{} is {}; it needs a finite number above 0", flag, *rate));
}

}  // namespace

double Machine::seconds(const Kernel& kernel) const {
  return std::max(static_cast<double>(kernel.flops) / flops_per_second,
                  static_cast<double>(kernel.bytes()) / bytes_per_second);
}

double Machine::seconds(std::span<const Kernel> kernels) const {
  double sum = 0;
  for (const Kernel& kernel : kernels) sum += seconds(kernel);
  return sum;
}

Machine preset(std::string_view name, ElementType element) {
  constexpr double kBf16Flops = 989e12;  // dense, SXM, of both
  if (name != "h100" && name != "h200")
    throw UsageError(fmt::format("--machine is {}; it needs h100, h200 or this", name));
  if (element != ElementType::bfloat16)
    throw UsageError(fmt::format("--machine {} is a rate of bf16 products; with --dtype fp32 it needs --tflops", name));
  return {.name = std::string(name),
          .flops_per_second = kBf16Flops,
          .bytes_per_second = name == "h100" ? 3.35e12 : 4.8e12,
          .source = fmt::format("peaks of the vendor's data sheet, {} SXM: sustained rates are lower",
                                name == "h100" ? "H100" : "H200")};
}

Machine measure_here(ElementType element) {
  constexpr int64_t kSize = 768;
  constexpr int64_t kFloats = int64_t{16} << 20;
  Cpu cpu;
  return {.name = "this",
          .flops_per_second =
              element == ElementType::bfloat16 ? product_rate<bf16>(cpu, kSize) : product_rate<float>(cpu, kSize),
          .bytes_per_second = triad_rate(cpu, kFloats),
          .source = fmt::format("measured now on {} threads: a product of {}³ in {}, a triad over {} MB", cpu.threads(),
                                kSize, explain::name(element), 3 * kFloats * 4 / 1000000)};
}

std::optional<Machine> machine(const std::string& name, std::optional<double> tflops, std::optional<double> tbps,
                               ElementType element) {
  check_rate("--tflops", tflops);
  check_rate("--tbps", tbps);
  if (name.empty() && !tflops && !tbps) return {};
  if (name.empty() && !tflops) throw UsageError("--tbps needs --tflops beside it, or --machine");
  if (name.empty() && !tbps) throw UsageError("--tflops needs --tbps beside it, or --machine");
  Machine machine{.name = "given", .source = "rates as given"};
  if (name == "this") {
    machine = measure_here(element);
  } else if (!name.empty()) {
    // A rate that is given makes up for one that the data sheet lacks.
    machine = preset(name, tflops ? ElementType::bfloat16 : element);
  }
  if (tflops) machine.flops_per_second = *tflops * 1e12;
  if (tbps) machine.bytes_per_second = *tbps * 1e12;
  if (!name.empty() && (tflops || tbps))
    machine.source += fmt::format("; {} as given", tflops && tbps ? "both rates" : tflops ? "TFLOP/s" : "TB/s");
  return machine;
}

}  // namespace coda::explain
