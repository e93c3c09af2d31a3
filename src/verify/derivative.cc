#include "verify/derivative.h"

#include <fmt/format.h>

#include <algorithm>

namespace coda::verify {

namespace {

ElementType element_of(AnyCase& c, std::string_view name) {
  const auto fields = c.fields();
  const auto found = std::ranges::find(fields, name, &Field::name);
  return found == fields.end() ? c.mapped_element() : found->element;
}

}  // namespace

oracle::Grid<double> elements_of(AnyCase& c, const std::string& name) {
  Storage& memory = c.storage_of(name);
  const ElementType element = element_of(c, name);
  oracle::Grid<double> grid(memory.rows(), memory.cols());
  for (int64_t i = 0; i < grid.rows; ++i)
    for (int64_t j = 0; j < grid.cols; ++j) grid(i, j) = AnyCase::stored(memory, element, i, j);
  return grid;
}

void write(AnyCase& c, const Exact& values) {
  for (const auto& [name, grid] : values) {
    Storage& memory = c.storage_of(name);
    const ElementType element = element_of(c, name);
    for (int64_t i = 0; i < grid.rows; ++i)
      for (int64_t j = 0; j < grid.cols; ++j) AnyCase::store(memory, element, i, j, grid(i, j));
  }
  c.remember();
}

oracle::Grid<Bounded> unrounded_accumulators(AnyCase& c, const Exact& exact) {
  const oracle::Grid<double> stored = elements_of(c, kMapped);
  oracle::Grid<Bounded> acc(c.m(), c.n());
  for (int64_t i = 0; i < c.m(); ++i)
    for (int64_t j = 0; j < c.n(); ++j) acc(i, j) = Unrounded(exact)(stored(i, j), kMapped, i, j);
  return acc;
}

std::vector<Row> judge(AnyCase& c, oracle::Outputs<Bounded> expected, const Exact& want, const std::string& program,
                       const std::string& of) {
  // Both are in double: the program's formula is off, whatever an engine makes of it.
  std::string wrong_formula;
  for (auto& output : expected.list) {
    const auto found = want.find(output.name);
    if (found == want.end()) throw Error("the derivative of " + of + " says nothing of " + std::string(output.name));
    const oracle::Grid<double>& right = found->second;
    double largest = 0;
    for (double x : right.values) largest = std::max(largest, std::fabs(x));
    for (int64_t i = 0; i < right.rows; ++i)
      for (int64_t j = 0; j < right.cols; ++j) {
        double& value = output.value(i, j).value;
        if (!(std::fabs(value - right(i, j)) <= 1e-12 * largest) && wrong_formula.empty())
          wrong_formula =
              fmt::format("the program's {} at row {}, column {} is {:.9g} in double, the derivative {:.9g}",
                          output.name, i, j, value, right(i, j));
        value = right(i, j);
      }
  }
  // Where operands are rounded to bf16, that is what a float output is off by.
  std::optional<ElementType> unit;
  for (const Field& field : c.fields())
    if (field.direction == Direction::in && field.element == ElementType::bfloat16) unit = ElementType::bfloat16;
  if (c.mapped_element() == ElementType::bfloat16) unit = ElementType::bfloat16;
  std::vector<Row> rows;
  for (cpu::Isa isa : instruction_sets()) {
    const Chosen chosen(isa);
    Row row{
        .check = Check::derivative, .program = program, .of = of, .engine = engine_name(isa), .fault = wrong_formula};
    c.run(pool(1));
    row.take(c.compare(expected, unit), fmt::format("map {}x{}", c.m(), c.n()));
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace coda::verify
