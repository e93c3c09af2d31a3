// What training a model takes of a GPU's memory, known without a GPU: counted by the constructors that allocate it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config.h"
#include "parameters.h"

namespace coda::llama {

/// A parameter's memory on a GPU: its values, and what products read of it.
template <class Engine>
struct GpuParameter : ParameterMemory<Engine> {
  GpuParameter(const Parameters& all, int index)
      : ParameterMemory<Engine>(all[index]), weight(all.is_multiplied(index) ? all[index].rows : 0, all[index].cols) {}
  BufferOn<Engine, bf16> weight;  // empty where no product reads it
};

/// A micro-batch: rows of seq tokens, each a document.
struct GpuStep {
  int64_t rows, seq;
  bool validates = false;  // a pass without gradients has memory of its own
  int64_t tokens() const { return rows * seq; }
};

struct MemoryPiece {
  std::string what;
  double bytes;
};
double sum(const std::vector<MemoryPiece>& pieces);

struct GpuMemory {
  std::vector<MemoryPiece> model;  // whatever the batch
  std::vector<MemoryPiece> layer;  // of one layer, kept for the backward pass
  int64_t layers;
  std::vector<MemoryPiece> pass;  // once for all layers

  double activations() const { return static_cast<double>(layers) * sum(layer) + sum(pass); }
  double total() const { return sum(model) + activations(); }
};
GpuMemory gpu_memory(const Config& config, const GpuStep& step);

/// The parameters alone, with gradients and moments.
std::vector<MemoryPiece> gpu_model_memory(const Config& config);
/// A pass over so many tokens: activations and the loss.
double gpu_pass_bytes(const Config& config, int64_t tokens, bool backward);

/// What the products of a layer's weight gradients take of workspace where their tokens are cut into slices.
int64_t weight_gradient_workspace(const Config& config, int64_t tokens, int multiprocessors);

/// "4.83 GB"
std::string gigabytes(double bytes);
/// "parameters 22.2 GB, main gradients 4.9 GB"
std::string text_of(const std::vector<MemoryPiece>& pieces);

/// One line: what is asked for, what is free of how much, and the largest batch that would fit; nothing if it fits.
std::optional<std::string> why_it_does_not_fit(const Config& config, const GpuStep& step, int64_t free, int64_t total);

}  // namespace coda::llama
