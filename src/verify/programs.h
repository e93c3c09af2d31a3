// The programs that `coda verify` and the tests go through: one line each, in programs/*.cc.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/row.h"

namespace coda::verify {

/// An output whose memory is an input's, of the same shape: a tile, or kMapped for the matrix that a map reads.
struct InPlace {
  std::string output, input;
};

/// Corrects what the oracle expects by what a run has stored: for a program that rounds inside, where two results are right.
using Adjust = std::function<void(AnyCase& c, oracle::Outputs<Bounded>& expected)>;

/// A program whose type is forgotten.
struct Program {
  std::string name;  // element type and all options: RmsNormSwiGlu<bf16, DropGateUp>
  std::span<const Field> fields;
  bool pairs;                // its call operator takes pairs
  int passes;                // of measure()
  int col_group, row_group;  // least common multiples of the widths and of the heights of its reductions; 1 without any
  std::vector<InPlace> in_place;
  Adjust adjust;
  std::function<std::unique_ptr<AnyCase>(int64_t m, int64_t n, Random& random, CaseOptions options)> make;
  const coda::detail::HopperKernels* (*hopper)();  // its kernels for a GPU; null where there are none

  /// m × n accumulators, n rounded up to what the program needs.
  std::unique_ptr<AnyCase> make_case(int64_t m, int64_t n, Random& random, CaseOptions options = {}) const;
};

/// The part of name in front of its angle brackets.
std::string_view family(std::string_view name);
/// Whether wanted stands for the program of this name: all of it, or without its last options, or without any.
bool stands_for(std::string_view wanted, std::string_view name);

namespace detail {
/// Of a type's name as the compiler spells it in __PRETTY_FUNCTION__, the part behind its namespaces and in front of its arguments.
std::string plain_name(std::string_view pretty_function);
/// With its arguments: HeadWidth<64>.
std::string option_name(std::string_view pretty_function);
/// RmsNormSwiGlu<bf16, KeepGateUp> for RmsNormGlu<bf16, Swiglu, KeepGateUp>: the name under which the header has it.
std::string with_aliases(std::string name);

template <class T>
std::string type_name() {
  return plain_name(__PRETTY_FUNCTION__);
}
template <class T>
std::string name_of_option() {
  return option_name(__PRETTY_FUNCTION__);
}

template <class P>
struct ProgramName;
template <template <class, class...> class P, class E, class... Options>
struct ProgramName<P<Tensors<E>, Options...>> {
  // Put together here: whether the compiler spells default arguments depends on where it is asked.
  static std::string get() {
    std::string name = type_name<P<Tensors<E>, Options...>>() + "<" + type_name<E>();
    ((name += ", " + name_of_option<Options>()), ...);
    return with_aliases(name + ">");
  }
};
}  // namespace detail

/// Element type and all options: RmsNormSwiGlu<bf16, DropGateUp>.
template <class P>
std::string name_of_program() {
  return detail::ProgramName<P>::get();
}

template <class P>
Program make_program(const std::vector<InPlace>& in_place = {}, const Adjust& adjust = {}) {
  static constexpr auto fields = describe<P>();
  constexpr auto numbers = std::make_integer_sequence<int, static_cast<int>(fields.size())>{};
  return {.name = name_of_program<P>(),
          .fields = fields,
          .pairs = takes_pairs<P>,
          .passes = coda::detail::measure_passes<P, coda::detail::accumulator_t<P, float>>(),
          .col_group = coda::detail::column_group<P>(numbers),
          .row_group = coda::detail::row_group<P>(numbers),
          .in_place = in_place,
          .adjust = adjust,
          .make = [](int64_t m, int64_t n, Random& random, CaseOptions options) -> std::unique_ptr<AnyCase> {
            return std::make_unique<Case<P>>(m, n, random, std::move(options));
          },
          .hopper = &coda::detail::linked_hopper_kernels<P>};
}

/// A backward program beside its forward program.
struct Derivative {
  std::string program, of;
  std::function<std::vector<Row>(uint64_t seed)> verify;  // a row for each engine
};

class Programs {
 public:
  template <class P>
  void add(const std::vector<InPlace>& in_place = {}, const Adjust& adjust = {}) {
    list_.push_back(make_program<P>(in_place, adjust));
  }

  void add_derivative(Derivative derivative) { derivatives_.push_back(std::move(derivative)); }

  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }
  size_t size() const { return list_.size(); }
  const std::vector<Derivative>& derivatives() const { return derivatives_; }

 private:
  std::vector<Program> list_;
  std::vector<Derivative> derivatives_;
};

/// Every program of include/coda/programs with its options, in float and in bf16, and the derivatives among them.
const Programs& library();

// Its parts, a file for each header.
void add_store(Programs& programs);
void add_norm(Programs& programs);
void add_glu(Programs& programs);
void add_activation(Programs& programs);
void add_head_norm(Programs& programs);
void add_layer_norm(Programs& programs);
void add_rope(Programs& programs);
void add_cross_entropy(Programs& programs);

}  // namespace coda::verify
