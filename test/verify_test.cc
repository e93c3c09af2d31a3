// That verification fails when it should, names what is wrong, and that the command says so by its exit code.
#include "verify/verify.h"

#include <CLI/CLI.hpp>
#include <sstream>

#include "../cli/commands.h"
#include "coda/error.h"
#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "program_cases.h"
#include "verify/derivative.h"
#include "verify_programs.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;
using verify::Check;
using verify::Row;

TEST(ProgramNames, HaveTheElementTypeAndAllOptions) {
  EXPECT_EQ(verify::name_of_program<RmsNorm<F>>(), "RmsNorm<float>");
  EXPECT_EQ(verify::name_of_program<RmsNormSwiGlu<F>>(), "RmsNormSwiGlu<float, KeepGateUp>");
  EXPECT_EQ((verify::name_of_program<Store<B, float>>()), "Store<bf16, float>");
  EXPECT_EQ((verify::name_of_program<RmsNormSwiGlu<B, DropGateUp>>()), "RmsNormSwiGlu<bf16, DropGateUp>");
  EXPECT_EQ((verify::name_of_program<RmsNormBackward<F, StreamEnds, GammaInEpilogue>>()),
            "RmsNormBackward<float, StreamEnds, GammaInEpilogue>");
  EXPECT_EQ(verify::name_of_program<TooLarge<B>>(), "TooLarge<bf16>");
}

TEST(ProgramNames, StandForAllOptionsThatTheyLeaveOut) {
  const std::string name = "RmsNormBackward<float, StreamEnds, GammaFolded>";
  for (const char* wanted :
       {"RmsNormBackward", "RmsNormBackward<float>", "RmsNormBackward<float, StreamEnds>", name.c_str()})
    EXPECT_TRUE(verify::stands_for(wanted, name)) << wanted;
  for (const char* wanted : {"", "RmsNorm", "RmsNormBackward<bf16>", "RmsNormBackward<float", "RmsNormBackward<>",
                             "RmsNormBackward<float, Stream>"})
    EXPECT_FALSE(verify::stands_for(wanted, name)) << wanted;
}

TEST(ProgramNames, AreEachOnce) {
  std::vector<std::string> names;
  for (const verify::Program& program : verify::library()) names.push_back(program.name);
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end());
}

TEST(Verify, ARowForEachEngine) {
  const auto rows = verify::verify(verify::make_program<Store<B>>(), {.rounds = 1});
  const auto engines = instruction_sets();
  ASSERT_EQ(rows.size(), 2 * engines.size());
  for (size_t i = 0; i < engines.size(); ++i) {
    EXPECT_EQ(rows[i].check, Check::oracle);
    EXPECT_EQ(rows[i].engine, verify::engine_name(engines[i]));
    EXPECT_EQ(rows[i].calls, 2 * (static_cast<int64_t>(verify::kSizes.size()) + 6));
    EXPECT_NE(rows[i].worst_call.find('x'), std::string::npos);
    // Rounded once, from a sum in float.
    EXPECT_GT(rows[i].worst.by_ulps.ulps, 0.49);
    EXPECT_LT(rows[i].worst.by_ulps.ulps, 0.52);
    EXPECT_EQ(rows[i].worst.by_ulps.output, "out");
    EXPECT_EQ(rows[engines.size() + i].check, Check::repetition);
    EXPECT_EQ(rows[engines.size() + i].calls, 2 * rows[i].calls);
  }
  expect_passed(rows);
}

TEST(Verify, SaysWhatIsWrongAndWhere) {
  for (const verify::Program& program : {verify::make_program<TooLarge<F>>(), verify::make_program<TooLarge<B>>()})
    for (const Row& row : verify::verify(program, {})) {
      if (row.check != Check::oracle) continue;
      EXPECT_FALSE(row.passed());
      EXPECT_GT(row.worst.by_share.share, 1);
      EXPECT_NE(row.fault.find(": y at row "), std::string::npos) << row.fault;
      EXPECT_NE(row.fault.find(" ± "), std::string::npos) << row.fault;
    }
}

TEST(Verify, NoticesOtherBitsOfTheSameCall) {
  bool noticed = false;
  for (const Row& row : verify::verify(verify::make_program<Unsteady<B>>(), {})) {
    EXPECT_TRUE(row.check == Check::repetition || row.passed()) << row.fault;
    noticed |= row.check == Check::repetition && row.fault.find("other bytes") != std::string::npos;
  }
  EXPECT_TRUE(noticed);
}

TEST(Verify, NoticesWritesOutsideAnOutput) {
  Random random(4);
  Case<Store<F>> c(5, 7, random);
  c.product<float, float>(3, Order::plain, Order::plain);
  c.run(pool(1));
  EXPECT_EQ(c.trespass(), std::nullopt);
  c.program().out.data[7] = 0;  // between two rows
  EXPECT_EQ(c.trespass(), "out: memory outside the output was written, at row 0, column 7");
  c.run(pool(1));
  c.storage_of("a").data<float>()[0] += 1;
  EXPECT_EQ(c.trespass(), "a: an input was written, at row 0, column 0");
}

TEST(Verify, AnElementBesideCancellingTermsIsMeasuredByItsOutput) {
  EXPECT_EQ(verify::ulp(1, ElementType::float32), 0x1p-23);
  EXPECT_EQ(verify::ulp(-3, ElementType::bfloat16), 0x1p-6);
  Random random(5);
  Case<Store<F>> c(2, 2, random);
  c.map<float>();
  auto expected = c.expected();
  c.run(pool(1));
  auto& value = expected.list[0].value;
  for (Bounded& x : value.values) x.value = 0;
  value(0, 0).value = 2;  // root mean square 1
  float* out = c.program().out.data;
  out[0] = 2;
  out[1] = 0x1p-22F;  // two units at 1
  out[c.program().out.stride] = out[c.program().out.stride + 1] = 0;
  EXPECT_EQ(c.compare(expected).by_ulps.ulps, 2);
}

/// A gradient that is not the forward program's.
TEST(Derivative, NoticesAnotherDerivative) {
  constexpr int64_t kRows = 3, kCols = 16;
  Random random(6);
  Case<RmsNorm<F>> backward(kRows, kCols, random);
  backward.map<float>();
  const verify::Exact operands{{kMapped, verify::elements_of(backward, kMapped)},
                               {"inv_rms", verify::elements_of(backward, "inv_rms")}};
  oracle::Grid<double> want(kRows, kCols);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) want(i, j) = operands.at("inv_rms")(0, i) * operands.at(kMapped)(i, j);
  for (const Row& row : verify::verify_derivative<RmsNorm<F>>(backward, operands, {{"y", want}}))
    EXPECT_TRUE(row.passed());
  want(1, 2) *= 1 + 1e-6;
  for (const Row& row : verify::verify_derivative<RmsNorm<F>>(backward, operands, {{"y", want}})) {
    EXPECT_NE(row.fault.find("y at row 1, column 2"), std::string::npos) << row.fault;
    EXPECT_GT(row.worst.by_share.share, 1);
  }
}

// ---- the command

/// What `coda verify …` does with these programs: its exit code, and what it prints.
struct Command {
  int code;
  std::string out;
};
Command verify_command(const verify::Programs& programs, std::vector<std::string> arguments) {
  CLI::App app("", "coda");
  const cli::Command command = cli::verify_command(app, [&]() -> const verify::Programs& { return programs; });
  std::ranges::reverse(arguments);
  arguments.emplace_back("verify");
  app.parse(arguments);
  testing::internal::CaptureStdout();
  int code = -1;
  try {
    code = command.run();
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  std::fflush(stdout);
  return {code, testing::internal::GetCapturedStdout()};
}

TEST(VerifyCommand, ExitsWithOneIfAProgramIsWrong) {
  verify::Programs programs;
  programs.add<Store<B>>();
  programs.add<TooLarge<B>>();
  const Command all = verify_command(programs, {"--rounds", "0"});
  EXPECT_EQ(all.code, 1);
  EXPECT_NE(all.out.find("FAIL"), std::string::npos);
  EXPECT_NE(all.out.find(": y at row "), std::string::npos) << all.out;
  const Command right = verify_command(programs, {"Store", "--rounds", "0"});
  EXPECT_EQ(right.code, 0);
  EXPECT_EQ(right.out.find("FAIL"), std::string::npos) << right.out;
}

TEST(VerifyCommand, ExitsWithOneIfACallCannotBeRepeated) {
  verify::Programs programs;
  programs.add<Unsteady<B>>();
  const Command command = verify_command(programs, {});
  EXPECT_EQ(command.code, 1);
  EXPECT_NE(command.out.find("other bytes"), std::string::npos) << command.out;
}

TEST(VerifyCommand, NamesTheProgramsThatThereAre) {
  verify::Programs programs;
  programs.add<Store<B>>();
  programs.add<Store<F>>();
  programs.add<RmsNorm<B>>();
  try {
    verify_command(programs, {"Stor"});
    ADD_FAILURE() << "a program that is not there was verified";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(),
                 "no program is called Stor; there are Store, RmsNorm, and with their options those of --list");
  }
}

}  // namespace
}  // namespace coda::test
