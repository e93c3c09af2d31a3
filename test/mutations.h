// Proof that the verification of a program can fail: what an engine, or the writer of a program, could get wrong is done on purpose,
// one thing at a time, and has to be noticed in every output that it touches.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "program_cases.h"

namespace coda::test {

/// Outputs that do not depend on some operands, so that a mutation of these cannot be noticed there. Lists are separated by ", ".
struct Indifferent {
  std::string_view program;  // all of its name, or without its last options
  std::string_view outputs;
  std::string_view operands;  // fields, "acc", or "partners of" one of them; "field read as 1" is this mutation only
  std::string_view reason;
};

inline bool has_name(std::string_view list, std::string_view name) {
  while (true) {
    const size_t end = list.find(", ");
    if (list.substr(0, end) == name) return true;
    if (end == std::string_view::npos) return false;
    list.remove_prefix(end + 2);
  }
}

/// Every mutation of one program.
class Mutations {
 public:
  Mutations(const verify::Program& program, std::span<const Indifferent> indifferent)
      : program_(program), indifferent_(indifferent), c_(program.make_case(20, 160, random_)) {
    c_->product(ElementType::float32, ElementType::float32, kDepth, Order::plain, Order::plain);
    auto expected = c_->expected();
    run(expected);
    EXPECT_TRUE(c_->compare(expected).passed()) << program.name << " is wrong before it is mutated";
    expected_ = std::move(expected);
  }

  /// What an engine stored: scaled, its partners swapped, its end not written.
  void of_outputs() {
    for (const auto& output : expected_.list) {
      const std::string what = std::string(output.name) + " ";
      spoil(output, what + "x 1.01", [&](Storage& memory) {
        const auto [i, j] = largest(output);
        change(memory, output.field.element, i, j, [](double x) { return 1.01 * x; });
      });
      spoil(output, what + "unwritten at its end",
            [&](Storage& memory) { memory.reset(memory.rows() - 1, memory.cols() - 1); });
      const Kind kind = output.field.kind;
      if ((kind == Kind::tile && program_.pairs) || kind == Kind::double_tile)
        spoil(output, what + "with a pair swapped",
              [&](Storage& memory) { swap_partners(memory, output.field.element); });
    }
  }

  /// The product: a term dropped, a pair swapped.
  void of_accumulators() {
    auto acc = c_->acc();
    const Storage &a = c_->storage_of("a"), &b = c_->storage_of("b");
    for (int64_t i = 0; i < acc.rows; ++i)
      for (int64_t j = 0; j < acc.cols; ++j)
        acc(i, j).value -= at(const_cast<Storage&>(a), i, kDepth - 1) * at(const_cast<Storage&>(b), j, kDepth - 1);
    expect_noticed("acc", "without its last term", acc, [] {});
    if (!program_.pairs) return;
    acc = c_->acc();
    // A whole row: of one pair a bf16 output can be the same by chance.
    for (int64_t j = 0; j < acc.cols; ++j)
      if (j % 16 < 8) std::swap(acc(kRow, j), acc(kRow, j + 8));
    expect_noticed("partners of acc", "swapped", acc, [] {});
  }

  /// What the program reads: everything as 0 or as 1, a row's value from the next row, partners swapped.
  void of_operands() {
    for (const std::string& name : c_->numbers()) {
      const double right = c_->set_number(name, 0);
      c_->set_number(name, right);
      for (double value : {0., 1.})
        if (value != right)
          expect_noticed(
              name, "read as another number", c_->acc(), [&] { c_->set_number(name, value); },
              [&] { c_->set_number(name, right); });
    }
    for (const Field& field : program_.fields) {
      if (field.kind == Kind::off || field.direction == Direction::local) continue;
      if (field.direction == Direction::out && field.kind != Kind::accumulate) continue;
      const std::string name(field.name);
      if (field.kind == Kind::number || field.kind == Kind::scalar) continue;
      Storage& memory = c_->storage_of(name);
      for (double value : {0., 1.})
        expect_noticed(name, value == 0 ? "read as 0" : "read as 1", c_->acc(), [&] {
          for (int64_t i = 0; i < memory.rows(); ++i)
            for (int64_t j = 0; j < memory.cols(); ++j) AnyCase::store(memory, field.element, i, j, value);
        });
      if (field.kind == Kind::per_row)
        expect_noticed(name, "read from the next row", c_->acc(), [&] {
          for (int64_t j = 0; j + 1 < memory.cols(); ++j)
            AnyCase::store(memory, field.element, 0, j, AnyCase::stored(memory, field.element, 0, j + 1));
        });
      if ((field.kind == Kind::tile && program_.pairs) || field.kind == Kind::double_tile)
        expect_noticed("partners of " + name, "swapped", c_->acc(), [&] { swap_partners(memory, field.element); });
    }
  }

  /// The entries of the table that applied.
  const std::set<const Indifferent*>& used() const { return used_; }

 private:
  static constexpr int64_t kDepth = 40, kRow = 3, kFirst = 17;

  static double at(Storage& memory, int64_t i, int64_t j) {
    return AnyCase::stored(memory, ElementType::float32, i, j);
  }
  template <class F>
  static void change(Storage& memory, ElementType element, int64_t i, int64_t j, const F& f) {
    if (element == ElementType::max_sum) {
      float& sum = memory.data<MaxSum>()[i * memory.stride() + j].sum;
      sum = static_cast<float>(f(sum));
    } else {
      AnyCase::store(memory, element, i, j, f(AnyCase::stored(memory, element, i, j)));
    }
  }
  static void swap_partners(Storage& memory, ElementType element) {
    const double first = AnyCase::stored(memory, element, kRow, kFirst);
    AnyCase::store(memory, element, kRow, kFirst, AnyCase::stored(memory, element, kRow, kFirst + 8));
    AnyCase::store(memory, element, kRow, kFirst + 8, first);
  }
  static std::pair<int64_t, int64_t> largest(const oracle::Output<Bounded>& output) {
    std::pair<int64_t, int64_t> found{0, 0};
    const auto size = [](Bounded x) { return std::isfinite(x.value) ? std::fabs(x.value) : -1; };
    for (int64_t i = 0; i < output.value.rows; ++i)
      for (int64_t j = 0; j < output.value.cols; ++j)
        if (size(output.value(i, j)) > size(output.value(found.first, found.second))) found = {i, j};
    return found;
  }

  void run(oracle::Outputs<Bounded>& expected) {
    c_->run(pool(1));
    if (program_.adjust) program_.adjust(*c_, expected);
  }

  template <class Spoil>
  void spoil(const oracle::Output<Bounded>& output, const std::string& what, const Spoil& mutate) {
    c_->run(pool(1));
    mutate(c_->storage_of(output.name));
    EXPECT_FALSE(c_->compare(output).passed()) << program_.name << ": " << what << " goes unnoticed";
  }

  /// The program of mutated operands beside an engine's run on the right ones.
  void expect_noticed(const std::string& operand, const std::string& how, const oracle::Grid<Bounded>& acc,
                      const std::function<void()>& mutate, const std::function<void()>& restore = {}) {
    c_->reset();
    mutate();
    auto expected = c_->apply(acc);
    if (restore) restore();
    c_->run(pool(1));
    if (program_.adjust) {
      mutate();
      program_.adjust(*c_, expected);
      if (restore) restore();
    }
    for (const auto& output : expected.list) {
      const auto entry = std::ranges::find_if(indifferent_, [&](const Indifferent& i) {
        return verify::stands_for(i.program, program_.name) && has_name(i.outputs, output.name) &&
               (has_name(i.operands, operand) || has_name(i.operands, operand + " " + how));
      });
      const bool noticed = !c_->compare(output).passed();
      if (entry == indifferent_.end()) {
        EXPECT_TRUE(noticed) << program_.name << ": " << operand << " " << how << " goes unnoticed in " << output.name;
      } else {
        used_.insert(&*entry);
        EXPECT_FALSE(noticed) << program_.name << ": " << output.name << " is said not to depend on " << operand << " ("
                              << entry->reason << "), but does";
      }
    }
  }

  const verify::Program& program_;
  std::span<const Indifferent> indifferent_;
  Random random_{1};
  std::unique_ptr<AnyCase> c_;
  oracle::Outputs<Bounded> expected_;
  std::set<const Indifferent*> used_;
};

/// Programs: a range of verify::Program. An entry of the table that applies to none of them is an error too.
template <class Programs>
void expect_every_mutation_noticed(const Programs& programs, std::span<const Indifferent> indifferent) {
  std::set<const Indifferent*> used;
  for (const verify::Program& program : programs) {
    Mutations mutations(program, indifferent);
    mutations.of_outputs();
    mutations.of_accumulators();
    mutations.of_operands();
    used.insert(mutations.used().begin(), mutations.used().end());
  }
  for (const Indifferent& entry : indifferent)
    EXPECT_TRUE(used.count(&entry) > 0) << entry.program << ", " << entry.outputs << ", " << entry.operands
                                        << ": there is nothing of that kind";
}

}  // namespace coda::test
