// How the GPU engine would run a program's products: the candidates of hopper/plan.h, and the one that is chosen. Needs no GPU.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "explain/block.h"
#include "explain/programs.h"
#include "hopper/plan_cache.h"

namespace coda::explain {

/// A GPU, as far as plans depend on it.
struct Card {
  std::string name;  // what CUDA calls it, and tuned plans are kept under
  int multiprocessors;
};
/// Of the machines `h100` and `h200` (SXM); none of any other.
std::optional<Card> card_of(std::string_view machine);
/// The calling thread's current GPU. Throws DeviceError where there is none that coda runs on. Defined in the GPU half: null where it is
/// not linked in.
[[gnu::weak]] Card current_card();

/// The candidates for one product, and which of them runs.
struct GpuPlan {
  coda::detail::Form form;
  hopper::Shape shape;
  std::vector<hopper::Candidate> candidates;  // best first
  size_t chosen = 0;
  bool tuned = false;

  const hopper::Candidate& choice() const { return candidates[chosen]; }
};

/// One for every form that the program is compiled for, or for form alone. None if it is compiled for maps only, or not at all.
/// sizes.k is given.
std::vector<GpuPlan> gpu_plans(const Program& program, const Sizes& sizes, std::optional<coda::detail::Form> form,
                               const Card& card, const hopper::TunedPlans& tuned);

/// The plan of a row of a block, which is of bf16: a chunk of the loss at a time. None of rows that are no products.
struct RowPlan {
  std::string row, program;
  GpuPlan plan;
};
std::vector<RowPlan> gpu_plans(const Block& block, const std::vector<Row>& rows, const Card& card,
                               const hopper::TunedPlans& tuned);

}  // namespace coda::explain
