// How long kernels would take on a machine of which two rates are known.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "explain/cost.h"

namespace coda::explain {

struct Machine {
  std::string name;
  double flops_per_second = 0;  // of products
  double bytes_per_second = 0;  // of memory
  std::string source;           // where the rates come from

  /// max(flops / rate, bytes / bandwidth): the product and its traffic overlap wholly, and nothing else takes time.
  double seconds(const Kernel& kernel) const;
  /// One after the other.
  double seconds(std::span<const Kernel> kernels) const;
};

/// `h100` or `h200`: peaks of the vendor's data sheets, for bf16. Throws UsageError for any other name, and for float, of which
/// they have no tensor cores.
Machine preset(std::string_view name, ElementType element);

/// This machine: the best of a few runs of one product through the engine, and of one triad a = b + s·c on all its threads,
/// counted as three tensors moved. Takes a fraction of a second and 200 MB.
Machine measure_here(ElementType element);

/// What the command line says. machine: empty, h100, h200 or this; tflops and tbps replace the rates of it, or make a machine
/// by themselves, of which both are needed. Nothing said is no machine. Throws UsageError naming the flag.
std::optional<Machine> machine(const std::string& name, std::optional<double> tflops, std::optional<double> tbps,
                               ElementType element);

}  // namespace coda::explain
