#include "explain/programs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "coda/error.h"
#include "verify/programs.h"

namespace coda::explain {
namespace {

/// What the programs of a family compute.
std::string formula(std::string_view family) {
  // clang-format off
  static const std::map<std::string_view, const char*> formulas = {
      {"Store", "out = acc"},
      {"StoreBiased", "out = acc + bias"},
      {"BiasGradient", "d_bias = Σ_rows acc"},
      {"AccumulateInto", "out += acc"},
      {"Residual", "h = acc + residual;  x = h ⊙ γ (γ in the epilogue);  Σ h²"},
      {"SumOfSquares", "Σ acc²"},
      {"RmsNorm", "y = r ⊙ acc"},
      {"RmsNormBackward", "d_h = γ ⊙ acc − r²·s·h + d_residual;  d_γ = Σ acc ⊙ h (γ in the epilogue)"},
      {"FoldedWeightGradient", "d_W = γ ⊙ acc;  d_γ = Σ_rows acc ⊙ W"},
      {"RmsNormSwiGlu", "z = r ⊙ acc;  y = silu(gate) · up"},
      {"SwiGluBackward", "d_z = vjp(swiglu, z, acc);  Σ d_z·z;  y again"},
      {"RmsNormGlu", "z = r ⊙ acc;  y = f(gate, up)"},
      {"GluBackward", "d_z = vjp(f, z, acc);  Σ d_z·z;  y again"},
      {"Activated", "z = r ⊙ acc + bias;  y = f(z)"},
      {"ActivatedBackward", "d_z = f′(z) · acc;  Σ d_z·z;  Σ_rows d_z;  y again"},
      {"RmsNormRope", "q, k = rotate(r ⊙ acc + bias);  v = r ⊙ acc + bias"},
      {"RopeBackward", "d_z = rotate⁻¹(acc), r ⊙ it;  Σ d_z·(z − bias);  Σ_rows d_z"},
      {"HeadNormRope", "z = r ⊙ acc;  q, k = rotate(γ ⊙ z / rms of the head);  v = z"},
      {"HeadNormRopeBackward", "d_z = vjp(head norm, z, rotate⁻¹(acc));  d_γ;  Σ d_z·z"},
      {"ResidualMoments", "h = acc + residual;  Σ h and Σ (h − mean)² of 128 columns"},
      {"LayerNorm", "y = r ⊙ (acc − μ·Σ_k W̃) + bias"},
      {"LayerNormUpstream", "r ⊙ acc;  its sums with Σ_k W̃ and with y − bias;  d_bias"},
      {"LayerNormBackward", "d_h = acc − r·t − r²·s·(h − μ) + d_residual"},
      {"CentredWeightGradient", "d_W̃ = acc − Σ_rows μ·r·d_y"},
      {"CrossEntropy", "l = f(r ⊙ acc);  log Σ exp l;  l[label];  l − max (kept logits);  Σ l"},
      {"CrossEntropyBackward", "d_l = exp(l − lse)·d_lse + [label]·d_label + d_sum;  Σ d_l·l"},
  };
  // clang-format on
  return formulas.at(family);
}

/// RmsNormGlu<bf16, Swiglu, KeepGateUp>: its options.
std::vector<std::string> options_of(std::string_view name) {
  std::vector<std::string> options;
  name.remove_suffix(1);
  size_t comma = name.find(", ");
  while (comma != std::string_view::npos) {
    const size_t next = name.find(", ", comma + 2);
    options.emplace_back(name.substr(comma + 2, next == std::string_view::npos ? next : next - comma - 2));
    comma = next;
  }
  return options;
}

Program program_of(const verify::Program& listed) {
  const std::string_view family = verify::family(listed.name);
  const std::string_view element = std::string_view(listed.name).substr(family.size() + 1, 4);
  return {.name = std::string(family),
          .element = element == "bf16" ? ElementType::bfloat16 : ElementType::float32,
          .options = options_of(listed.name),
          .formula = formula(family),
          .fields = {listed.fields.begin(), listed.fields.end()},
          .pairs = listed.pairs,
          .passes = listed.passes,
          .col_group = listed.col_group,
          .row_group = listed.row_group};
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

std::optional<ElementType> activations(std::string_view word) {
  if (word == "bf16") return ElementType::bfloat16;
  if (word == "float" || word == "fp32") return ElementType::float32;
  return {};
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
  // Of a gated unit the function is always said: the default one has a name of its own.
  const size_t always = name == "RmsNormGlu" || name == "GluBackward" ? 1 : 0;
  size_t said = options.size();
  while (said > always && options[said - 1] == defaults[said - 1]) --said;
  std::string out = fmt::format("{}<{}", name, explain::name(element));
  for (size_t i = 0; i < said; ++i) out += ", " + options[i];
  return out + ">";
}

std::span<const Program> programs() {
  static const std::vector<Program> list = [] {
    std::vector<Program> all;
    for (const verify::Program& listed : verify::library()) all.push_back(program_of(listed));
    std::stable_partition(all.begin(), all.end(), [](const Program& p) { return p.element == ElementType::bfloat16; });
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
