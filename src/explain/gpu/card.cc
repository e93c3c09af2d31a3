#include "coda/gpu.h"
#include "explain/gpu_plan.h"

namespace coda::explain {

Card current_card() {
  const Gpu gpu;
  return {gpu.name(), gpu.multiprocessors()};
}

}  // namespace coda::explain
