#include "verify/programs.h"

namespace coda::verify {

const Programs& library() {
  static const Programs all = [] {
    Programs programs;
    add_store(programs);
    add_norm(programs);
    add_swiglu(programs);
    add_rope(programs);
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

std::string program_name(std::string_view pretty_function) {
  // g++: "… pretty() [with P = coda::RmsNormSwiGlu<coda::Tensors<coda::bf16>, coda::DropGateUp>; std::string_view = …]".
  std::string_view type = pretty_function.substr(pretty_function.find("P = ") + 4);
  type = type.substr(0, type.find_first_of(";]"));
  std::string name;
  for (size_t i = 0; i < type.size();) {
    const std::string_view rest = type.substr(i);
    const std::string_view word = rest.substr(0, rest.find_first_of("<>, :"));
    if (rest.starts_with("::")) {  // what stands in front of it is a namespace
      i += 2;
      while (!name.empty() && name.back() != '<' && name.back() != ' ') name.pop_back();
    } else if (word == "Tensors") {  // Tensors<E> is E
      i += word.size() + 1;
      const size_t end = type.find('>', i);
      const std::string_view element = type.substr(i, end - i);
      name += element.substr(element.rfind(':') + 1);
      i = end + 1;
    } else if (rest.starts_with(" >")) {
      i += 1;
    } else {
      const size_t length = word.empty() ? 1 : word.size();
      name += rest.substr(0, length);
      i += length;
    }
  }
  return name;
}

}  // namespace detail

}  // namespace coda::verify
