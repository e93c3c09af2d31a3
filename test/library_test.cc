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
constexpr std::string_view kBeforeTheFunction = "stored before the function takes it";
constexpr std::string_view kAlongZ = "a normed head's gradient has nothing along z but what eps leaves";
constexpr std::string_view kNotItsOwn = "an operand of another output";
constexpr Indifferent kIndifferent[] = {
    {"Residual", "h, sum_sq", "gamma", "the stream is stored and summed before gamma"},
    {"RmsNormBackward", "d_gamma", "inv_rms, mean_dot, d_residual, gamma", "takes the product and h"},
    {"FoldedWeightGradient", "d_weight", "weight", "the product times gamma"},
    {"FoldedWeightGradient", "d_gamma", "gamma", "the product of what gamma multiplies"},
    {"SwiGluBackward", "y", "acc, inv_rms", "made of gate and up again, not of a gradient"},
    {"SwiGluBackward", "dot_z", "inv_rms", kBeforeTheNorm},
    {"RopeBackward", "d_qkv", "qkv, partners of qkv", "turns back what came in, whatever was stored"},
    {"RopeBackward", "dot, d_bias", "inv_rms", kBeforeTheNorm},
    {"RopeBackward<float, WithoutBias>", "dot", "position, turns_high, turns_low", "a rotation does not change it"},
    {"RopeBackward<bf16, WithoutBias>", "dot", "position, turns_high, turns_low", "a rotation does not change it"},
    {"RopeBackward", "d_qkv, d_bias", "bias", "z has it already"},
    {"RopeBackward", "d_bias", "qkv, partners of qkv", "turns back what came in, whatever was stored"},
    {"RmsNormRope", "qkv", "turns_low read as 1", kWholeTurns},
    {"RopeBackward", "d_qkv, d_bias, dot", "turns_low read as 1", kWholeTurns},
    {"CrossEntropy", "maxima, relative_logits, log_sum_exp", "label", "one column's number is nothing to a whole row"},
    {"CrossEntropy<bf16, KeepLogits>", "log_sum_exp, label_logit", "acc, inv_rms", kStored},
    {"CrossEntropyBackward<float, KeepLogits>", "dot", "inv_rms", kBeforeTheNorm},
    {"CrossEntropyBackward<bf16, KeepLogits>", "dot", "inv_rms", kBeforeTheNorm},
    {"CrossEntropy<bf16, KeepLogits>", "logit_sum", "acc, inv_rms", kStored},
    {"CrossEntropy", "relative_logits, maxima", "f.cap", kBeforeTheFunction},
    {"CrossEntropy", "logit_sum", "label", "all columns count alike"},
    {"RmsNormGlu", "gate_up", "f.limit, f.alpha", kBeforeTheFunction},
    {"GluBackward", "y", "acc, inv_rms", "made of gate and up again, not of a gradient"},
    {"GluBackward", "dot_z", "inv_rms", kBeforeTheNorm},
    {"ActivatedBackward", "y", "acc, inv_rms, bias", "made of z again, not of a gradient"},
    {"ActivatedBackward", "dot_z, d_bias", "inv_rms", kBeforeTheNorm},
    {"ActivatedBackward", "d_z, d_bias", "bias", "z has it already"},
    {"HeadNormRope", "z", "position, turns_high, turns_low, gamma, eps, normed_columns",
     "stored before its head's norm"},
    {"HeadNormRope", "qkv", "turns_low read as 1", kWholeTurns},
    {"HeadNormRopeBackward", "d_qkv, d_gamma, dot", "turns_low read as 1", kWholeTurns},
    {"HeadNormRopeBackward", "d_gamma, dot", "inv_rms", kBeforeTheNorm},
    {"HeadNormRopeBackward", "d_gamma", "gamma", "the product of what gamma multiplies"},
    {"HeadNormRopeBackward<float, HeadWidth<64>>", "dot", "partners of z", kAlongZ},
    {"HeadNormRopeBackward<bf16, HeadWidth<64>>", "dot", "partners of z", kAlongZ},
    {"LayerNormUpstream", "d_y, d_bias, dot_col_sum", "y, mean, bias", kNotItsOwn},
    {"LayerNormUpstream", "d_y, d_bias, dot", "col_sum", kNotItsOwn},
    {"LayerNormUpstream", "mean_gradient", "y, col_sum, bias", kNotItsOwn},
    {"LayerNormUpstream", "dot", "mean", kNotItsOwn},
    {"LayerNormUpstream", "d_bias, dot_col_sum, dot", "inv_std", kBeforeTheNorm},
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

/// Those of LayerNorm and of heads' norms have tests of their own: their derivative takes several programs, or gamma too.
TEST(Library, HoldsEveryBackwardProgramToADerivative) {
  for (const verify::Program& program : library()) {
    const std::string_view family = verify::family(program.name);
    if (!family.ends_with("Backward") || family == "LayerNormBackward" || family == "HeadNormRopeBackward") continue;
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
