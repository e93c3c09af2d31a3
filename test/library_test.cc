// Every program of the library, on every engine: what `coda verify` does, and that it would notice. A program gets here by its line
// in src/verify/programs/.
#include "coda/programs/store.h"
#include "mutations.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using verify::library;

std::vector<verify::Program> programs() {
  return {library().begin(), library().end()};
}

class LibraryProgram : public testing::TestWithParam<verify::Program> {};
INSTANTIATE_TEST_SUITE_P(Library, LibraryProgram, testing::ValuesIn(programs()),
                         [](const auto& info) { return test_name(info.param.name); });

TEST_P(LibraryProgram, IsTheOracles) {
  expect_passed(verify::verify(GetParam(), {.seed = 1, .rounds = 0}));
}

constexpr std::string_view kBeforeTheNorm = "the sum is of the gradient before the norm's scale";
constexpr std::string_view kWholeTurns =
    "as many whole turns as the position, and float rounds those to parts of a turn";
constexpr std::string_view kStored = "held to the logits as they were stored, and these feel it";
constexpr Indifferent kIndifferent[] = {
    {"Residual", "h, sum_sq", "gamma", "the stream is stored and summed before gamma"},
    {"RmsNormBackward", "d_gamma", "inv_rms, mean_dot, d_residual, gamma", "takes the product and h"},
    {"SwiGluBackward", "y", "acc, inv_rms", "made of gate and up again, not of a gradient"},
    {"SwiGluBackward", "dot_z", "inv_rms", kBeforeTheNorm},
    {"RopeBackward", "d_qkv", "qkv, partners of qkv", "turns back what came in, whatever was stored"},
    {"RopeBackward", "dot", "inv_rms", kBeforeTheNorm},
    {"RopeBackward", "dot", "position, turns_high, turns_low", "a rotation does not change it"},
    {"RmsNormRope", "qkv", "turns_low read as 1", kWholeTurns},
    {"RopeBackward", "d_qkv", "turns_low read as 1", kWholeTurns},
    {"CrossEntropy", "maxima, relative_logits, log_sum_exp", "label", "one column's number is nothing to a whole row"},
    {"CrossEntropy<bf16, KeepLogits>", "log_sum_exp, label_logit", "acc, inv_rms", kStored},
    {"CrossEntropyBackward<float, KeepLogits>", "dot", "inv_rms", kBeforeTheNorm},
    {"CrossEntropyBackward<bf16, KeepLogits>", "dot", "inv_rms", kBeforeTheNorm},
};

TEST(Library, NoticesEveryMutation) {
  expect_every_mutation_noticed(library(), kIndifferent);
}

class LibraryDerivative : public testing::TestWithParam<verify::Derivative> {};
INSTANTIATE_TEST_SUITE_P(Library, LibraryDerivative, testing::ValuesIn(library().derivatives()),
                         [](const auto& info) { return test_name(info.param.program); });

TEST_P(LibraryDerivative, IsTheForwardPrograms) {
  const auto rows = GetParam().verify(1);
  EXPECT_EQ(rows.size(), instruction_sets().size());
  expect_passed(rows);
}

TEST(Library, HoldsEveryBackwardProgramToADerivative) {
  for (const verify::Program& program : library()) {
    if (verify::family(program.name).find("Backward") == std::string_view::npos) continue;
    EXPECT_EQ(std::ranges::count(library().derivatives(), program.name, &verify::Derivative::program), 1)
        << program.name;
  }
}

TEST(Library, EveryFormOfAProduct) {
  check_products<Store<Tensors<float>>>(1, {}, {}, Forms::all);
  check_products<AccumulateInto<Tensors<bf16>>>(1, {}, {}, Forms::all);
}

}  // namespace
}  // namespace coda::test
