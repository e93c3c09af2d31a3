#include "explain/plan.h"

#include <fmt/format.h>

#include "cpu/isa.h"
#include "cpu/multiply.h"
#include "cpu/product.h"

namespace coda::explain {

std::vector<Decision> cpu_plan(const Program& program, int threads) {
  using namespace cpu;
  const Multiplication inner = multiplication(program.element, program.element);
  const std::string_view word = inner.word == Word::float32 ? "float" : "bf16-pair";
  const auto grouped = [](int64_t size, int group, const char* of) {
    return group > 1 ? fmt::format("{}, in multiples of {} {}", size, group, of) : fmt::format("{}", size);
  };
  std::vector<Decision> plan;
  plan.push_back(
      {"instruction set", std::string(name(chosen_isa())), "the best that this CPU has, or what CODA_CPU_ISA names"});
  plan.push_back({"tile in registers", fmt::format("{} × {}", inner.tile_rows, inner.tile_cols),
                  "two registers wide, as many rows as leave registers for a row of b and one value of a"});
  plan.push_back({"rows of a block", "about " + grouped(inner.block_rows, program.row_group, "for ColSum"),
                  "near that, such that every thread gets about the same number"});
  plan.push_back({"rows at a time",
                  fmt::format("{}, in whole tiles", grouped(inner.strip_rows(), program.row_group, "for ColSum")),
                  "of the last part of the depth: the program takes them out of the first-level cache"});
  plan.push_back({"columns of a block", grouped(kColBlock, program.col_group, "for the row reductions"),
                  fmt::format("a group is never cut; {} × {} accumulators, {} KB, stay in the second-level cache",
                              inner.block_rows, kColBlock, inner.block_rows * kColBlock * 4 / 1024)});
  plan.push_back(
      {"depth of a block", fmt::format("{}", inner.block_depths()),
       "its panel of b is half of a 32 KB first-level cache; sums are made of parts this long, or small terms "
       "would drown in a large one"});
  plan.push_back(
      {"packing of a", fmt::format("a block's rows to {} panels", word), "by the thread that multiplies them"});
  plan.push_back({"packing of b", fmt::format("columns to {} panels, {} MB at a time", word, (kPackedWords * 4) >> 20),
                  "once for all threads: enough to spread over them, small beside the tensors"});
  plan.push_back({"threads", fmt::format("{}", threads),
                  "over row blocks, and over panels where those are few; any number of them gives the same bits"});
  return plan;
}

}  // namespace coda::explain
