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

std::string plain_name(std::string_view pretty_function) {
  // g++: "std::string coda::verify::detail::type_name() [with T = coda::Residual<coda::Tensors<coda::bf16> >; …]"
  std::string_view type = pretty_function.substr(pretty_function.find("T = ") + 4);
  type = type.substr(0, type.find_first_of("<;]"));
  return std::string(type.substr(type.rfind(':') + 1));
}

}  // namespace detail

}  // namespace coda::verify
