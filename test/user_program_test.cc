// Programs that a user writes, on the CPU engine against the oracle. This is how they are tested: a line each.
#include "user_program.h"

#include "mutations.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

std::vector<verify::Program> programs() {
  verify::Programs all;
  all.add<HeadNorm<F>>();
  all.add<HeadNorm<B>>();
  all.add<GroupSoftmax<F>>();
  all.add<GroupSoftmax<B>>();
  all.add<CausalScores<F>>();
  all.add<PairPositions<F>>();
  all.add<ManyFields<F>>();
  all.add<ManyFields<B>>();
  all.add<Spread<F>>();
  all.add<Spread<B>>();
  return {all.begin(), all.end()};
}

class UserProgram : public testing::TestWithParam<verify::Program> {};
INSTANTIATE_TEST_SUITE_P(Programs, UserProgram, testing::ValuesIn(programs()),
                         [](const auto& info) { return test_name(info.param.name); });

TEST_P(UserProgram, IsTheOracles) {
  expect_passed(verify::verify(GetParam(), {.seed = 1, .rounds = 0}));
}

constexpr std::string_view kSymmetric = "both of a pair count alike";
constexpr std::string_view kOnlyProduct = "only product takes it";
constexpr std::string_view kOnlyOther = "only other_total takes it";
constexpr Indifferent kIndifferent[] = {
    {"HeadNorm", "mean_square", "eps, gamma", "of the accumulators alone"},
    {"HeadNorm", "mean_square", "partners of acc", kSymmetric},
    {"PairPositions", "lse, largest", "partners of acc", kSymmetric},
    {"ManyFields", "row_sum", "partners of acc, partners of precise", kSymmetric},
    {"ManyFields", "total, other_total, columns, squares, row_sum", "eps, weight, half, partial_sum, partial_max",
     kOnlyProduct},
    {"ManyFields", "total, product, columns, squares, row_sum", "shift, offset, other_total", kOnlyOther},
    {"ManyFields", "other_total", "scale, precise, partners of precise, total",
     "of the accumulators and numbers alone"},
    {"ManyFields", "product, columns, squares, row_sum", "total", "what is added to is nothing to the others"},
    {"Spread", "dots", "acc", "of z alone"},
    {"Spread", "dots", "partners of z", kSymmetric},
};

TEST(UserPrograms, NoticeEveryMutation) {
  expect_every_mutation_noticed(programs(), kIndifferent);
}

}  // namespace
}  // namespace coda::test
