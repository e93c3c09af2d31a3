#include "explain/gpu_plan.h"

#include <algorithm>

#include "explain/compiled.h"

namespace coda::explain {

namespace {

using coda::detail::HopperKernels;

/// What the GPU half compiles of a program; null if nothing.
const Compiled* compiled_of(const Program& program) {
  for (const Compiled& one : compiled())
    if (one.name.starts_with(program.name + "<") && &find_program(one.name) == &program) return &one;
  return nullptr;
}

GpuPlan plan_of(const HopperKernels& kernels, const hopper::Problem& problem, const Card& card,
                const hopper::TunedPlans& tuned) {
  GpuPlan plan{
      .form = problem.form, .shape = problem.shape, .candidates = hopper::candidates(problem, kernels), .chosen = 0};
  const hopper::Plan choice = hopper::choose(problem, kernels, card.name, tuned);
  plan.tuned = choice.tuned;
  const auto chosen = std::ranges::find_if(
      plan.candidates, [&](const hopper::Candidate& c) { return c.kernel == choice.kernel && c.band == choice.band; });
  plan.chosen = static_cast<size_t>(chosen - plan.candidates.begin());
  return plan;
}

}  // namespace

std::optional<Card> card_of(std::string_view machine) {
  if (machine == "h100") return Card{"NVIDIA H100 80GB HBM3", hopper::kMultiprocessors};
  if (machine == "h200") return Card{"NVIDIA H200", hopper::kMultiprocessors};
  return {};
}

std::vector<GpuPlan> gpu_plans(const Program& program, const Sizes& sizes, std::optional<coda::detail::Form> form,
                               const Card& card, const hopper::TunedPlans& tuned) {
  std::vector<GpuPlan> plans;
  const Compiled* found = compiled_of(program);
  if (found == nullptr) return plans;
  using coda::detail::Form;
  for (const Form one : {Form::TN, Form::NN, Form::NT}) {
    if (form && one != *form) continue;
    if (std::ranges::find(found->products, one, &coda::detail::HopperKernel::form) == found->products.end()) continue;
    plans.push_back(plan_of(found->kernels(),
                            {.form = one,
                             .shape = {sizes.m, sizes.n, *sizes.k},
                             .epilogue_tiles = hopper::epilogue_tiles(program.fields),
                             .multiprocessors = card.multiprocessors},
                            card, tuned));
  }
  return plans;
}

std::vector<RowPlan> gpu_plans(const Block& block, const std::vector<Row>& rows, const Card& card,
                               const hopper::TunedPlans& tuned) {
  std::vector<RowPlan> plans;
  for (const Row& row : rows) {
    if (row.step != Step::product) continue;
    Sizes sizes = row.sizes;
    // Of the loss a chunk at a time; tokens are the rows, or the depth of a weight's gradient.
    if (row.loss) (row.form == Form::nt ? *sizes.k : sizes.m) = block.chunk;
    const auto form = row.form == Form::tn   ? coda::detail::Form::TN
                      : row.form == Form::nn ? coda::detail::Form::NN
                                             : coda::detail::Form::NT;
    for (GpuPlan& plan : gpu_plans(*row.program, sizes, form, card, tuned))
      plans.push_back({row.name, row.program->spelling(), std::move(plan)});
  }
  return plans;
}

}  // namespace coda::explain
