// A backward program held to the derivative of its forward program: the forward program runs on dual numbers, and what an engine
// stores for the backward one must be that, up to the roundings of the program and of the operands that it reads.
#pragma once
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "verify/verify.h"

namespace coda::verify {

using Slope = Dual<double, 1>;

/// Operands (or kMapped) and outputs by name, not rounded.
using Exact = std::map<std::string, oracle::Grid<double>, std::less<>>;

/// c's accumulators on numbers of type T; those of Slope grow where moves(row, col).
template <class T, class Moves>
oracle::Grid<T> moved_accumulators(const AnyCase& c, const Moves& moves) {
  oracle::Grid<T> acc(c.m(), c.n());
  for (int64_t i = 0; i < c.m(); ++i)
    for (int64_t j = 0; j < c.n(); ++j) {
      acc(i, j) = T(c.acc()(i, j).value);
      if constexpr (std::is_same_v<T, Slope>)
        if (moves(i, j)) acc(i, j).slope[0] = 1;
    }
  return acc;
}

/// The outputs of c's program in double.
template <class P>
oracle::Outputs<double> values(const Case<P>& c) {
  return oracle::apply<double>(moved_accumulators<double>(c, nullptr), c.program());
}

/// d(i, j) = dL_i/dacc(i, j), where loss(outputs, i) is L_i of row i's outputs. Rows do not depend on each other.
template <class P, class Loss>
oracle::Grid<double> gradient(const Case<P>& c, const Loss& loss) {
  oracle::Grid<double> d(c.m(), c.n());
  for (int64_t j = 0; j < c.n(); ++j) {
    const auto acc = moved_accumulators<Slope>(c, [j](int64_t, int64_t col) { return col == j; });
    const auto outputs = oracle::apply<Slope>(acc, c.program());
    for (int64_t i = 0; i < c.m(); ++i) d(i, j) = loss(outputs, i);
  }
  return d;
}

/// What an operand holds.
oracle::Grid<double> elements_of(AnyCase& c, const std::string& name);
/// Puts values into operands, rounded to what each stores.
void write(AnyCase& c, const Exact& values);

/// A Bounded of a stored element: what it would be if it were not rounded, and by how much it was.
class Unrounded {
 public:
  explicit Unrounded(const Exact& exact) : exact_(exact) {}
  Bounded operator()(double stored, std::string_view field, int64_t row, int64_t col) const {
    const auto found = exact_.find(field);
    if (found == exact_.end()) return {stored, 0};
    const double exact = found->second(row, col);
    return {exact, std::fabs(stored - exact)};
  }

 private:
  const Exact& exact_;
};

/// The accumulators of a map.
oracle::Grid<Bounded> unrounded_accumulators(AnyCase& c, const Exact& exact);

/// Rows for the backward program of c, whose operands have been written: expected is what it makes of the unrounded ones, want the
/// derivative.
std::vector<Row> judge(AnyCase& c, oracle::Outputs<Bounded> expected, const Exact& want, const std::string& program,
                       const std::string& of);

/// The backward program of c, a map, reads operands; its outputs must be want.
template <class Forward, class Backward>
std::vector<Row> verify_derivative(Case<Backward>& c, const Exact& operands, const Exact& want) {
  write(c, operands);
  auto expected = oracle::apply<Bounded>(unrounded_accumulators(c, operands), c.program(), Unrounded(operands));
  return judge(c, std::move(expected), want, name_of_program<Backward>(), name_of_program<Forward>());
}

/// Adds the derivative that rows(seed) verifies.
template <class Forward, class Backward>
void add_derivative(Programs& programs, std::vector<Row> (*rows)(uint64_t seed)) {
  programs.add_derivative({name_of_program<Backward>(), name_of_program<Forward>(), rows});
}

}  // namespace coda::verify
