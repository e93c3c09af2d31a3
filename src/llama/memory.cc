#include "memory.h"

#include <fmt/format.h>
#include <sys/sysinfo.h>

#include "coda/error.h"

namespace coda::llama {

void check_memory(const std::string& what, double bytes) {
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return;
  const double there = (static_cast<double>(info.totalram) + static_cast<double>(info.totalswap)) * info.mem_unit;
  if (bytes > there) {
    throw UsageError(fmt::format("{} take {:.3g} GB, but this machine has {:.3g} GB", what, bytes / 1e9, there / 1e9));
  }
}

}  // namespace coda::llama
