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

constexpr Indifferent kIndifferent[] = {
    {"HeadNorm", "mean_square", "gamma", ""},
};

TEST_P(UserProgram, NoticesEveryMutation) {
  expect_every_mutation_noticed(GetParam(), kIndifferent);
}

}  // namespace
}  // namespace coda::test
