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

constexpr std::string_view kBeforeGamma = "h is stored, and its squares summed, before gamma";
constexpr std::string_view kWeightGradient = "the gradient of gamma takes the product and h";
constexpr std::string_view kRecomputed = "y is made of gate and up again, not of its gradient";
constexpr std::string_view kBeforeTheNorm = "the sum is of the gradient before the norm's scale";
constexpr std::string_view kNotRotated = "a rotation does not change the sum, which takes what came in and what was stored";
constexpr std::string_view kNoLabel = "logits and their sum do not know the label";
constexpr std::string_view kStored = "it is held to the stored logits, which do depend on it";
constexpr Indifferent kIndifferent[] = {
    {"Residual<float, GammaInEpilogue>", "h", "gamma", kBeforeGamma},
    {"Residual<float, GammaInEpilogue>", "sum_sq", "gamma", kBeforeGamma},
    {"Residual<bf16, GammaInEpilogue>", "h", "gamma", kBeforeGamma},
    {"Residual<bf16, GammaInEpilogue>", "sum_sq", "gamma", kBeforeGamma},
    {"SwiGluBackward", "y", "acc", kRecomputed},
    {"SwiGluBackward", "y", "inv_rms", kRecomputed},
    {"SwiGluBackward", "dot_z", "inv_rms", kBeforeTheNorm},
    {"RopeBackward", "d_qkv", "qkv", "the gradient is turned back, whatever was turned"},
    {"RopeBackward", "d_qkv", "partners of qkv", "the gradient is turned back, whatever was turned"},
    {"RopeBackward", "dot", "inv_rms", kBeforeTheNorm},
    {"RopeBackward", "dot", "position", kNotRotated},
    {"RopeBackward", "dot", "turns_high", kNotRotated},
    {"RopeBackward", "dot", "turns_low", kNotRotated},
};

TEST_P(LibraryProgram, NoticesEveryMutation) {
  expect_every_mutation_noticed(GetParam(), kIndifferent);
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
    EXPECT_EQ(std::ranges::count(library().derivatives(), program.name, &verify::Derivative::program), 1) << program.name;
  }
}

TEST(Library, EveryFormOfAProduct) {
  check_products<Store<Tensors<float>>>(1, {}, {}, Forms::all);
  check_products<AccumulateInto<Tensors<bf16>>>(1, {}, {}, Forms::all);
}

}  // namespace
}  // namespace coda::test
