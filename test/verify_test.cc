// That verification fails when it should, names what is wrong, and that the command says so by its exit code.
#include "verify/verify.h"

#include <CLI/CLI.hpp>
#include <algorithm>
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

// Of the kept, rounded z a backward program may clamp what its forward program did not, or the other way round.
TEST(Derivative, BesideALimitEitherSideIsRight) {
  const auto& derivatives = verify::library().derivatives();
  const auto clamped = std::ranges::find(derivatives, "GluBackward<bf16, SwigluClamped>", &verify::Derivative::program);
  ASSERT_NE(clamped, derivatives.end());
  for (uint64_t seed = 11; seed <= 18; ++seed)
    for (const Row& row : clamped->verify(seed))
      EXPECT_TRUE(row.passed()) << row.engine << ", seed " << seed << ": " << row.worst.by_share.share
                                << " of the bound";
}

TEST(Arithmetic, AChoiceIsAsFarOffAsWhatItChoosesBetween) {
  const Bounded x(1.0, 0.01), limit(1.005);
  EXPECT_EQ(select(x < limit, Bounded(3.0, 0.5), Bounded(7)).error, 4.5);
  EXPECT_EQ(select(x < Bounded(1.02), Bounded(3.0, 0.5), Bounded(7)).error, 0.5);
  EXPECT_EQ(select(Bounded(1) < Bounded(1), Bounded(3), Bounded(7, 0.25)).error, 0.25);  // nothing is in doubt
}

// ---- other engines

TEST(Case, AlignsFactorsAndTilesIfAsked) {
  Random random(7);
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  for (bool aligned : {false, true}) {
    Case<Residual<B>> c(5, 24, random, {.padding = 3, .aligned = aligned});
    c.product<bf16, bf16>(9, Order::plain, Order::transposed);
    for (Storage* s : {&c.storage_of("a"), &c.storage_of("b"), &c.storage_of("residual"), &c.storage_of("h")}) {
      EXPECT_EQ(address(s->data<bf16>()) % 16 == 0, aligned) << s->name();
      EXPECT_EQ(s->stride() * 2 % 16 == 0, aligned) << s->name();
    }
    // Not what a kernel has no reason to ask for.
    EXPECT_NE(address(c.storage_of("sum_sq").data<float>()) % 16, 0U);
    c.run(pool(1));
    EXPECT_EQ(c.trespass(), std::nullopt);
  }
}

/// An engine with memory of its own, as a GPU has, which it shares with nobody.
class Elsewhere : public verify::Engine {
 public:
  std::string name() const override { return "elsewhere"; }
  std::vector<verify::Way> ways(AnyCase& /*c*/) override {
    return {{"once", [this](AnyCase& c) { run(c); }}, {"twice", [this](AnyCase& c) { run(c); }}};
  }
  std::vector<verify::Way> again(AnyCase& /*c*/, Random& /*random*/) override {
    return {{"and again", [this](AnyCase& c) {
               run(c);
               if (forgets) c.reset();
             }}};
  }
  bool forgets = false;

 private:
  static void run(AnyCase& c) {
    c.reset();
    std::vector<std::vector<std::byte>> copies;
    for (const Storage& s : c.storages()) copies.push_back(s.bytes());
    const auto placed = [&](const void* address) -> const void* {
      const auto* byte = static_cast<const std::byte*>(address);
      size_t i = 0;
      for (const Storage& s : c.storages()) {
        if (byte >= s.bytes().data() && byte < s.bytes().data() + s.bytes().size())
          return copies[i].data() + (byte - s.bytes().data());
        ++i;
      }
      throw Error("an address of nobody's");
    };
    const std::vector<std::byte> before = c.memory();
    c.with_call(placed, [](const verify::Call& call) {
      if (call.is_map)
        coda::detail::run_map(pool(1), call.a, call.program, call.cpu);
      else
        coda::detail::run_product(pool(1), call.a, call.b, call.program, call.cpu);
    });
    EXPECT_EQ(c.memory(), before) << "an operand was not placed";
    size_t i = 0;
    for (Storage& s : c.storages()) std::ranges::copy(copies[i++], s.writable_bytes().begin());
  }
};

verify::Device elsewhere(bool forgets) {
  auto engine = std::make_unique<Elsewhere>();
  engine->forgets = forgets;
  verify::Device device{.engines = {}, .sizes = verify::kSizes, .arithmetic = verify::kLanes, .gpu = false};
  device.engines.push_back(std::move(engine));
  return device;
}

TEST(Verify, PlacesEveryOperandWhereAnEngineHasIt) {
  for (const verify::Program& program :
       {verify::make_program<Residual<B, GammaInEpilogue>>({{"h", "residual"}}),
        verify::make_program<RmsNormSwiGlu<B>>(), verify::make_program<AccumulateInto<B>>()})
    expect_passed(verify::verify(program, {}, elsewhere(false)));
}

TEST(Verify, HoldsEveryWayOfAnEngineToTheFirst) {
  const auto rows = verify::verify(verify::make_program<Store<B>>(), {}, elsewhere(true));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_TRUE(rows[0].passed()) << rows[0].fault;
  EXPECT_NE(rows[1].fault.find("and again other bytes than at first once"), std::string::npos) << rows[1].fault;
}

/// x cut after this many bits behind the first of size.
double cut(double x, double size, int bits) {
  const double unit = std::ldexp(1.0, std::ilogb(size) - bits);
  return std::trunc(x / unit) * unit;
}

TEST(Arithmetic, BoundsASumThatTensorCoresCut) {
  Random random(8);
  for (int64_t k : {1, 16, 17, 1000, 4096}) {
    std::vector<double> a(static_cast<size_t>(k)), b(a);
    // Of one sign, so that what is cut off adds up.
    for (double& x : a) x = double(bf16(static_cast<float>(uniform(random, 0, 1))));
    for (double& x : b) x = double(bf16(static_cast<float>(uniform(random, 0, 1))));
    double sum = 0, exact = 0;
    for (size_t begin = 0; begin < a.size(); begin += 16) {
      const size_t end = std::min(begin + 16, a.size());
      double largest = sum, step = 0;
      for (size_t d = begin; d < end; ++d) largest = std::max(largest, a[d] * b[d]);
      if (largest == 0) continue;
      for (size_t d = begin; d < end; ++d) step += cut(a[d] * b[d], largest, 25);
      step += cut(sum, largest, 25);
      sum = step > 0 ? cut(step, step, 23) : 0;
      for (size_t d = begin; d < end; ++d) exact += a[d] * b[d];
    }
    const double bound = verify::truncated_sum_error(a.data(), b.data(), k);
    EXPECT_LE(std::fabs(sum - exact), bound) << k;
    if (k > 100) {
      EXPECT_GT(std::fabs(sum - exact), bound / 16) << k;
    }
  }
}

TEST(Arithmetic, IsAssumedForAsLongAsItIsAskedFor) {
  const double lanes = exp(Bounded(-10)).error;
  {
    const verify::Assume assume(verify::kHopperArithmetic);
    EXPECT_GT(exp(Bounded(-10)).error, 3 * lanes);
    EXPECT_GT((Bounded(1) / Bounded(3)).error, 3 * verify::kFloatRounding / 3);
  }
  EXPECT_EQ(exp(Bounded(-10)).error, lanes);
}

/// Tests are never linked with the GPU half.
TEST(Verify, WithoutTheGpuHalfThereIsNoGpuEngine) {
  EXPECT_FALSE(verify::gpu_half_is_linked());
  EXPECT_EQ(verify::make_program<Store<B>>().hopper(), nullptr);
  try {
    verify::gpu_device();
    ADD_FAILURE() << "there is a GPU engine";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(), "this coda was built without its GPU half: `make cuda` builds it");
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

TEST(VerifyCommand, IsBriefOnAGpuOnly) {
  verify::Programs programs;
  programs.add<Store<B>>();
  for (const char* device : {"cpu", "all"}) {
    try {
      verify_command(programs, {"--brief", "--device", device});
      ADD_FAILURE() << device << " is brief";
    } catch (const UsageError& e) {
      EXPECT_STREQ(e.what(), "--brief goes with --device cuda");
    }
  }
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
