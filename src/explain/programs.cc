#include "explain/programs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "coda/error.h"
#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"

namespace coda::explain {
namespace {

template <class P>
Program entry(const char* name, const std::vector<std::string>& options, const char* formula) {
  constexpr auto fields = describe<P>();
  constexpr auto numbers = std::make_integer_sequence<int, static_cast<int>(fields.size())>{};
  return {.name = name,
          .element = detail::element_type<Activation, detail::element_of<P>>(),
          .options = options,
          .formula = formula,
          .fields = {fields.begin(), fields.end()},
          .pairs = takes_pairs<P>,
          .passes = detail::measure_passes<P, detail::accumulator_t<P, float>>(),
          .col_group = detail::column_group<P>(numbers),
          .row_group = detail::row_group<P>(numbers)};
}

/// The table: a line per program, for each type of activations.
template <class E>
void add_programs(std::vector<Program>& list) {
  using S = Tensors<E>;
  const auto add = [&](Program program) { list.push_back(std::move(program)); };
  // clang-format off
  add(entry<Store<S>>("Store", {"Activation"}, "out = acc"));
  if constexpr (!std::is_same_v<E, float>)
    add(entry<Store<S, float>>("Store", {"float"}, "out = acc"));
  add(entry<AccumulateInto<S>>("AccumulateInto", {}, "out += acc"));
  add(entry<Residual<S>>("Residual", {"GammaFolded"}, "h = acc + residual;  Σ h²"));
  add(entry<Residual<S, GammaInEpilogue>>("Residual", {"GammaInEpilogue"}, "h = acc + residual;  x = h ⊙ γ;  Σ h²"));
  add(entry<RmsNorm<S>>("RmsNorm", {}, "y = r ⊙ acc"));
  add(entry<RmsNormBackward<S>>("RmsNormBackward", {"StreamJoins", "GammaFolded"}, "d_h = acc − r²·s·h + d_residual"));
  add(entry<RmsNormBackward<S, StreamEnds>>("RmsNormBackward", {"StreamEnds", "GammaFolded"}, "d_h = acc − r²·s·h"));
  add(entry<RmsNormBackward<S, StreamJoins, GammaInEpilogue>>("RmsNormBackward", {"StreamJoins", "GammaInEpilogue"}, "d_h = γ ⊙ acc − r²·s·h + d_residual;  d_γ = Σ acc ⊙ h"));
  add(entry<RmsNormBackward<S, StreamEnds, GammaInEpilogue>>("RmsNormBackward", {"StreamEnds", "GammaInEpilogue"}, "d_h = γ ⊙ acc − r²·s·h;  d_γ = Σ acc ⊙ h"));
  add(entry<RmsNormSwiGlu<S>>("RmsNormSwiGlu", {"KeepGateUp"}, "z = r ⊙ acc;  y = silu(gate) · up"));
  add(entry<RmsNormSwiGlu<S, DropGateUp>>("RmsNormSwiGlu", {"DropGateUp"}, "z = r ⊙ acc;  y = silu(gate) · up"));
  add(entry<SwiGluBackward<S>>("SwiGluBackward", {}, "d_z = vjp(swiglu, z, acc);  Σ d_z·z;  y again"));
  add(entry<RmsNormRope<S>>("RmsNormRope", {}, "q, k = rotate(r ⊙ acc);  v = r ⊙ acc"));
  add(entry<RopeBackward<S>>("RopeBackward", {}, "r ⊙ rotate⁻¹(acc);  Σ acc·qkv"));
  add(entry<CrossEntropy<S>>("CrossEntropy", {"KeepLogits"}, "l = r ⊙ acc;  log Σ exp l;  l[label];  l − max"));
  add(entry<CrossEntropy<S, RecomputeLogits>>("CrossEntropy", {"RecomputeLogits"}, "l = r ⊙ acc;  log Σ exp l;  l[label]"));
  add(entry<CrossEntropyBackward<S>>("CrossEntropyBackward", {"KeepLogits"}, "d_l = (exp(l − lse) − [label]) · d_loss;  Σ d_l·l"));
  add(entry<CrossEntropyBackward<S, RecomputeLogits>>("CrossEntropyBackward", {"RecomputeLogits"}, "l = r ⊙ acc;  d_l = (exp(l − lse) − [label]) · d_loss;  Σ d_l·l"));
  // clang-format on
}

/// As the caller may write it, without what changes nothing: spaces, coda::, Tensors<E> for E.
std::string plain(std::string_view spelling) {
  std::string out;
  for (const char c : spelling)
    if (c != ' ') out += c;
  const auto remove = [&](std::string_view word) {
    for (size_t at; (at = out.find(word)) != std::string::npos;) out.erase(at, word.size());
  };
  remove("coda::");
  constexpr std::string_view kTensors = "Tensors<";
  if (const size_t at = out.find(kTensors); at != std::string::npos) {
    if (const size_t end = out.find('>', at); end != std::string::npos) out.erase(end, 1);
    out.erase(at, kTensors.size());
  }
  return out;
}

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> out;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    out.emplace_back(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return out;
}

std::optional<ElementType> activations(std::string_view word) {
  if (word == "bf16") return ElementType::bfloat16;
  if (word == "float" || word == "fp32") return ElementType::float32;
  return {};
}

const Program& first_of(const std::string& name) {
  return *std::ranges::find(programs(), name, &Program::name);
}

}  // namespace

std::string_view name(ElementType element) {
  switch (element) {
    case ElementType::bfloat16:
      return "bf16";
    case ElementType::int32:
      return "int32";
    case ElementType::max_sum:
      return "MaxSum";
    case ElementType::float32:
      break;
  }
  return "float";
}

std::string Program::spelling() const {
  const std::vector<std::string>& defaults = first_of(name).options;
  size_t said = options.size();
  while (said > 0 && options[said - 1] == defaults[said - 1]) --said;
  std::string out = fmt::format("{}<{}", name, explain::name(element));
  for (size_t i = 0; i < said; ++i) out += ", " + options[i];
  return out + ">";
}

std::span<const Program> programs() {
  static const std::vector<Program> list = [] {
    std::vector<Program> all;
    add_programs<bf16>(all);
    add_programs<float>(all);
    return all;
  }();
  return list;
}

const Program& find_program(std::string_view spelling) {
  const std::string wanted = plain(spelling);
  const size_t open = std::min(wanted.find('<'), wanted.size());
  const std::string name = wanted.substr(0, open);
  std::vector<std::string> arguments;
  const bool closed = open == wanted.size() || wanted.back() == '>';
  if (closed && open < wanted.size())
    arguments = split(std::string_view(wanted).substr(open + 1, wanted.size() - open - 2));

  ElementType element = ElementType::bfloat16;
  if (!arguments.empty()) {
    if (const auto given = activations(arguments.front())) {
      element = *given;
      arguments.erase(arguments.begin());
    }
  }
  std::vector<std::string> names, spellings;
  for (const Program& program : programs()) {
    if (std::ranges::find(names, program.name) == names.end()) names.push_back(program.name);
    if (program.name != name) continue;
    spellings.push_back(program.spelling());
    if (closed && program.element == element && arguments.size() <= program.options.size() &&
        std::equal(arguments.begin(), arguments.end(), program.options.begin()))
      return program;
  }
  if (spellings.empty())
    throw UsageError(fmt::format("PROGRAM is {}; it needs one of {}, or block", spelling, fmt::join(names, ", ")));
  throw UsageError(fmt::format("PROGRAM is {}; it needs one of {}", spelling, fmt::join(spellings, ", ")));
}

}  // namespace coda::explain
