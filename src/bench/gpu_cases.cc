#include <fmt/format.h>

#include <algorithm>

#include "coda/error.h"
#include "gpu.h"

namespace coda::bench {

namespace {

int64_t size_of(Extent extent, int64_t hidden) {
  switch (extent) {
    case Extent::d:
      return hidden;
    case Extent::d3:
      return 3 * hidden;
    case Extent::f:
      return gpu_ffn(hidden);
    case Extent::f2:
      return 2 * gpu_ffn(hidden);
    case Extent::v32768:
      return 32768;
    case Extent::v128256:
      return 128256;
  }
  return 0;
}

}  // namespace

const std::vector<GpuRow>& gpu_rows() {
  using enum Extent;
  static const std::vector<GpuRow> rows = {
      {"store-tn", "Store", Fused::store, Form::TN, 0.95, 1.02, {{d, d}, {f2, d}, {d, f}}},
      {"store-nn", "Store", Fused::store, Form::NN, 0.98, 1.03, {{d, f}, {d, f2}}},
      {"store-nt", "Store", Fused::store, Form::NT, 0.98, 1.03, {{d, f}, {f2, d}}},
      {"residual", "Residual", Fused::residual, Form::TN, 0.97, 1.04, {{d, d}, {d, f}}},
      {"residual-rms", "ResidualRms", Fused::residual_rms, Form::TN, 0.99, 1.07, {{d, d}, {d, f}}},
      {"swiglu", "RmsNormSwiGlu, y", Fused::swiglu, Form::TN, 0.95, 1.03, {{f2, d}}},
      {"swiglu-keep", "RmsNormSwiGlu, y and gate_up", Fused::swiglu_keep, Form::TN, 0.96, 1.03, {{f2, d}}},
      {"rope", "RmsNormRope", Fused::rope, Form::TN, 0.96, 1.03, {{d3, d}}},
      {"loss", "CrossEntropy", Fused::loss, Form::TN, 0.96, 1.03, {{v32768, d}, {v128256, d}}},
      {"loss-keep", "CrossEntropy and logits", Fused::loss_keep, Form::TN, 0.98, 1.03, {{v32768, d}, {v128256, d}}},
      {"swiglu-backward", "SwiGluBackward", Fused::swiglu_backward, Form::NN, 0.99, 1.10, {{f, d}}},
      {"norm-backward", "RmsNormBackward", Fused::norm_backward, Form::NN, 0.99, 1.06, {{d, f2}, {d, d3}}},
      {"softmax-gradient",
       "CrossEntropyBackward",
       Fused::softmax_gradient,
       Form::TN,
       0.97,
       1.03,
       {{v32768, d}, {v128256, d}}},
      {"gradient", "Store, fp32", Fused::store_float, Form::NT, 0.98, 1.03, {{d, d}, {d, f}, {f2, d}}},
      {"gradient-accumulate",
       "AccumulateInto, fp32",
       Fused::accumulate,
       Form::NT,
       0.98,
       1.03,
       {{d, d}, {d, f}, {f2, d}}},
  };
  return rows;
}

int64_t gpu_ffn(int64_t hidden) {
  return (8 * hidden + 3 * 256 - 1) / (3 * 256) * 256;
}

std::vector<GpuCase> gpu_cases(const GpuOptions& options) {
  for (const std::string& wanted : options.rows)
    if (std::ranges::find(gpu_rows(), wanted, &GpuRow::name) == gpu_rows().end()) {
      std::string names;
      for (const GpuRow& row : gpu_rows()) names += (names.empty() ? "" : ", ") + std::string(row.name);
      throw UsageError(fmt::format("{} is not a row of the GPU's table; there are {}", wanted, names));
    }
  std::vector<GpuCase> cases;
  for (const int64_t hidden : options.hidden)
    for (const GpuRow& row : gpu_rows()) {
      if (!options.rows.empty() && std::ranges::find(options.rows, row.name) == options.rows.end()) continue;
      for (const auto& [first, second] : row.shapes) {
        const int64_t a = size_of(first, hidden), b = size_of(second, hidden);
        if (row.form == Form::NT)
          cases.push_back({&row, hidden, a, b, options.tokens, options.slices});
        else
          cases.push_back({&row, hidden, options.tokens, a, b, options.slices});
      }
    }
  return cases;
}

}  // namespace coda::bench
