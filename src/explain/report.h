// What `coda explain` says, for people and for machines.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "explain/block.h"
#include "explain/plan.h"

namespace coda::explain {

/// One program, with sizes or without.
struct ProgramReport {
  const Program& program;
  std::optional<Sizes> sizes;
  std::optional<Machine> machine;
  std::vector<Decision> plan;
};

/// One block: completed, with its rows.
struct BlockReport {
  Block block;
  std::vector<Row> rows;
  std::optional<Machine> machine;
};

std::string text(const ProgramReport& report);
std::string text(const BlockReport& report);
nlohmann::ordered_json json(const ProgramReport& report);
nlohmann::ordered_json json(const BlockReport& report);

/// Every spelling and what it does, a line each.
std::string program_list();

}  // namespace coda::explain
