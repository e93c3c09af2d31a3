// Programs held to the oracle, as tests of a program write it: check_products<P>(seed) and check_maps<P>(seed). src/verify does it.
#pragma once
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "verify/derivative.h"
#include "verify/verify.h"

namespace coda::test {

using verify::AnyCase;
using verify::Bounded;
using verify::Case;
using verify::CaseOptions;
using verify::Chosen;
using verify::instruction_sets;
using verify::kFunctionError;
using verify::kMapped;
using verify::kRotationError;
using verify::normal;
using verify::Order;
using verify::pool;
using verify::Random;
using verify::Storage;
using verify::uniform;

inline void expect_passed(const std::vector<verify::Row>& rows) {
  for (const verify::Row& row : rows)
    EXPECT_TRUE(row.passed()) << row.program << " on " << row.engine << ": " << row.fault;
}

/// The outputs as the oracle has them. A test of a program that rounds inside replaces, after a run, what depends on how a
/// value was rounded.
struct AsTheOracle {
  template <class P>
  void operator()(Case<P>&, oracle::Outputs<Bounded>&) const {}
};

/// Whether a program meets every form of the factors at every size, or one form at each size.
enum class Forms { in_turn, all };

template <class P, class Expected>
verify::Program program_of(const CaseOptions& options, const Expected& after_a_run) {
  std::vector<verify::InPlace> in_place;
  for (const auto& [output, input] : options.in_place) in_place.push_back({output, input});
  return verify::make_program<P>(in_place, [after_a_run](AnyCase& c, oracle::Outputs<Bounded>& expected) {
    after_a_run(static_cast<Case<P>&>(c), expected);
  });
}

/// A seed of P's own.
template <class P>
uint64_t seed_of() {
  return std::hash<std::string>{}(verify::name_of_program<P>());
}

/// P over products of all sizes, float and bf16 factors mixed, also with outputs in place.
template <class P, class Expected = AsTheOracle>
void check_products(uint64_t seed, const CaseOptions& options = {}, const Expected& after_a_run = {},
                    Forms forms = Forms::in_turn) {
  expect_passed(verify::verify(program_of<P>(options, after_a_run),
                               {.seed = seed, .rounds = 0, .every_form = forms == Forms::all, .maps = false}));
}

/// P over stored matrices, also with outputs in place.
template <class P, class Expected = AsTheOracle>
void check_maps(uint64_t seed, const CaseOptions& options = {}, const Expected& after_a_run = {}) {
  expect_passed(verify::verify(program_of<P>(options, after_a_run), {.seed = seed, .rounds = 0, .products = false}));
}

/// How the outputs of c's program change when the accumulators where moves(row, col) grow.
template <class P, class Moves>
oracle::Outputs<verify::Slope> derivative(Case<P>& c, const Moves& moves) {
  return oracle::apply<verify::Slope>(verify::moved_accumulators<verify::Slope>(c, moves), c.program());
}

/// Makes the name of a program fit for the name of a test.
inline std::string test_name(const std::string& program) {
  std::string name;
  for (char c : program)
    if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      name += c;
    else if (!name.empty() && name.back() != '_')
      name += '_';
  while (!name.empty() && name.back() == '_') name.pop_back();
  return name;
}

}  // namespace coda::test

namespace coda::verify {
inline void PrintTo(const Program& program, std::ostream* out) {
  *out << program.name;
}
inline void PrintTo(const Derivative& derivative, std::ostream* out) {
  *out << derivative.program;
}
}  // namespace coda::verify
