// Writing the file of tuned plans.
#pragma once
#include <filesystem>
#include <span>

#include "hopper/plan_cache.h"

namespace coda::bench {

/// Puts entries among those of the file, in one step: a reader finds the old file or the new one, and of processes that do this at
/// once none loses what another put there. A file that is damaged or not one of ours is replaced. Makes the folder. Throws
/// FileError.
void record_plans(const std::filesystem::path& path, std::span<const hopper::TunedEntry> entries);

}  // namespace coda::bench
