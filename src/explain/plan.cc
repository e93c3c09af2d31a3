#include "explain/plan.h"

#include <fmt/format.h>

#include "cpu/isa.h"
#include "cpu/product.h"

namespace coda::explain {

std::vector<Decision> cpu_plan(const Program& program, ElementType factors, int threads) {
  using namespace cpu;
  const auto grouped = [](int64_t size, int group, const char* of) {
    return group > 1 ? fmt::format("{}, in multiples of {} {}", size, group, of) : fmt::format("{}", size);
  };
  std::vector<Decision> plan;
  plan.push_back({"instruction set", std::string(name(chosen_isa())),
                  "the best that this CPU has, or what CODA_CPU_ISA names; the program is compiled once for each"});
  plan.push_back({"rows of a block", "at most " + grouped(kRowBlock, program.row_group, "for ColSum"),
                  "sixteen of the micro-kernel's six rows on AVX2; fewer where threads would get unequal shares"});
  plan.push_back({"columns of a block", grouped(kColBlock, program.col_group, "for the row reductions"),
                  fmt::format("a group is never cut; {} × {} accumulators, {} KB, stay in L2 until the program has run",
                              kRowBlock, kColBlock, kRowBlock * kColBlock * 4 / 1024)});
  plan.push_back({"depth of a block", fmt::format("{}", kDepthBlock),
                  "with the panels of one depth block the accumulators fit a 512 KB L2"});
  plan.push_back({"parts of a sum", fmt::format("{} deep", kDepthPart),
                  "a longer sum is made of parts: in one running fp32 sum small terms drown in a large one"});
  plan.push_back({"packing of a",
                  factors == ElementType::float32 ? "none, read in place; a transposed factor is packed"
                                                  : "rows of a block to float, by the thread that multiplies them",
                  "the micro-kernel reads floats along the depth"});
  plan.push_back({"packing of b", fmt::format("columns to float panels, {} MB at a time", (kPanelFloats * 4) >> 20),
                  "once for all threads; enough to spread over them, small beside the tensors"});
  plan.push_back({"threads", fmt::format("{}", threads),
                  "over row blocks, and panels where those are few; every number of them gives the same bits"});
  return plan;
}

}  // namespace coda::explain
