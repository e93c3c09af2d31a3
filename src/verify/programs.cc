#include "verify/programs.h"

#include <algorithm>
#include <array>

namespace coda::verify {

const Programs& library() {
  static const Programs all = [] {
    Programs programs;
    add_store(programs);
    add_norm(programs);
    add_glu(programs);
    add_activation(programs);
    add_rope(programs);
    add_head_norm(programs);
    add_layer_norm(programs);
    add_cross_entropy(programs);
    return programs;
  }();
  return all;
}

std::string_view family(std::string_view name) {
  return name.substr(0, name.find('<'));
}

bool stands_for(std::string_view wanted, std::string_view name) {
  if (wanted == name || wanted == family(name)) return true;
  if (!wanted.ends_with('>')) return false;
  wanted.remove_suffix(1);
  return name.starts_with(wanted) && name.substr(wanted.size()).starts_with(", ");
}

std::unique_ptr<AnyCase> Program::make_case(int64_t m, int64_t n, Random& random, CaseOptions options) const {
  const int64_t step = column_step(fields, pairs);
  return make(m, (n + step - 1) / step * step, random, std::move(options));
}

namespace detail {

std::string with_aliases(std::string name) {
  for (const auto& [family_of_all, function, its_own] :
       {std::array<std::string_view, 3>{"RmsNormGlu", "Swiglu", "RmsNormSwiGlu"},
        std::array<std::string_view, 3>{"GluBackward", "Swiglu", "SwiGluBackward"}}) {
    const size_t comma = std::min(name.find(", "), name.size());
    const size_t end = comma + 2 + function.size();
    if (family(name) != family_of_all || name.size() < end || name.compare(comma + 2, function.size(), function) != 0 ||
        (name[end] != ',' && name[end] != '>'))
      continue;
    return std::string(its_own) + name.substr(family_of_all.size(), comma - family_of_all.size()) + name.substr(end);
  }
  return name;
}

std::string plain_name(std::string_view pretty_function) {
  std::string type = option_name(pretty_function);
  type = type.substr(0, type.find('<'));
  return type.substr(type.rfind(':') + 1);
}

std::string option_name(std::string_view pretty_function) {
  // g++: "std::string coda::verify::detail::type_name() [with T = coda::Residual<coda::Tensors<coda::bf16> >; …]"
  std::string_view type = pretty_function.substr(pretty_function.find("T = ") + 4);
  std::string name(type.substr(0, type.find_first_of(";]")));
  for (size_t at; (at = name.find("coda::")) != std::string::npos;) name.erase(at, 6);
  return name;
}

}  // namespace detail

}  // namespace coda::verify
