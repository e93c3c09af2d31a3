// What `coda explain` says, for people and for machines.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "explain/block.h"
#include "explain/gpu_plan.h"
#include "explain/plan.h"
#include "llama/gpu_memory.h"

namespace coda::explain {

/// One program, with sizes or without.
struct ProgramReport {
  const Program& program;
  std::optional<Sizes> sizes;
  std::optional<Machine> machine;
  std::vector<Decision> plan;
  std::optional<Card> card{};        // of gpu_plans
  std::vector<GpuPlan> gpu_plans{};  // a form each
};

/// One block: completed, with its rows.
struct BlockReport {
  Block block;
  std::vector<Row> rows;
  std::optional<Machine> machine;
  std::optional<Card> card{};                // of gpu_plans
  std::vector<RowPlan> gpu_plans{};          // a product each
  std::optional<llama::GpuMemory> memory{};  // of a model of such layers that a GPU trains
};

std::string text(const ProgramReport& report);
std::string text(const BlockReport& report);
nlohmann::ordered_json json(const ProgramReport& report);
nlohmann::ordered_json json(const BlockReport& report);

/// Every spelling and what it does, a line each.
std::string program_list();

}  // namespace coda::explain
