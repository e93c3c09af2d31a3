#include "verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

namespace coda::verify {

namespace {

/// A seed of the program's own, so that the programs meet a size in different forms.
uint64_t seed_of(std::string_view name) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash;
}

const char* name_of(ElementType element) {
  return element == ElementType::bfloat16 ? "bf16" : "float";
}

struct Form {
  Order a, b;
  const char* name;
};
constexpr std::array kForms = {Form{Order::plain, Order::plain, "TN"}, Form{Order::plain, Order::transposed, "NN"},
                               Form{Order::transposed, Order::transposed, "NT"}};
constexpr auto kFloat = ElementType::float32, kBf16 = ElementType::bfloat16;
constexpr std::array kMixtures = {std::pair{kFloat, kFloat}, std::pair{kBf16, kBf16}, std::pair{kFloat, kBf16},
                                  std::pair{kBf16, kFloat}};

/// The rows of one program as they grow.
class Trial {
 public:
  Trial(const Program& program, uint64_t seed) : program_(program), random_(seed ^ seed_of(program.name)) {
    for (cpu::Isa isa : instruction_sets()) {
      oracle_.push_back({.check = Check::oracle, .program = program.name, .engine = engine_name(isa)});
      repetition_.push_back({.check = Check::repetition, .program = program.name, .engine = engine_name(isa)});
    }
  }

  /// The products that plan asks for, all the maps, and the program's own forms in place.
  void all_calls(const Size& size, const Plan& plan, int64_t padding) {
    if (plan.products) {
      for (size_t form = 0; form < kForms.size() && plan.every_form; ++form)
        for (size_t mixture = 0; mixture < kMixtures.size(); ++mixture) product(size, form, mixture, {padding, {}});
      if (!plan.every_form) product(size, {padding, {}});
    }
    if (plan.maps) map(size, random_() % 2 == 0 ? kFloat : kBf16, {padding, {}});
    for (const InPlace& alias : program_.in_place) {
      const CaseOptions options{padding, {{alias.output, alias.input}}};
      if (alias.input != kMapped && plan.products) product(size, options);
      if (alias.input == kMapped && plan.maps) map(size, element_of(alias.output), options);
    }
  }
  /// Mostly with tails, now and then 0 or 1; strides odd and even.
  void random_calls(const Plan& plan) {
    const Size size{random_size(200), random_size(300), random_size(600)};
    all_calls(size, plan, static_cast<int64_t>(uniform(random_, 0, 10)));
  }

  bool faulty() const {
    return !std::ranges::all_of(oracle_, &Row::passed) || !std::ranges::all_of(repetition_, &Row::passed);
  }
  std::vector<Row> rows() && {
    for (Row& row : repetition_) oracle_.push_back(std::move(row));
    return std::move(oracle_);
  }

 private:
  int64_t random_size(double most) {
    if (uniform(random_, 0, 1) < 0.1) return uniform(random_, 0, 1) < 0.5 ? 0 : 1;
    return static_cast<int64_t>(std::exp(uniform(random_, std::log(2), std::log(most))));
  }
  ElementType element_of(const std::string& output) const {
    return std::ranges::find(program_.fields, output, &Field::name)->element;
  }

  void product(const Size& size, const CaseOptions& options) {
    // How factors are read does not depend on the program.
    product(size, random_() % kForms.size(), random_() % kMixtures.size(), options);
  }
  void product(const Size& size, size_t form_number, size_t mixture, const CaseOptions& options) {
    const Form& form = kForms[form_number];
    const auto [a, b] = kMixtures[mixture];
    const auto c = program_.make_case(size.m, size.n, random_, options);
    c->product(a, b, size.k, form.a, form.b);
    call(*c, fmt::format("{}x{}x{} {}, {} · {}{}", c->m(), c->n(), size.k, form.name, name_of(a), name_of(b),
                         text(options)));
  }
  void map(const Size& size, ElementType x, const CaseOptions& options) {
    const auto c = program_.make_case(size.m, size.n, random_, options);
    c->map(x);
    call(*c, fmt::format("map {}x{}, {}{}", c->m(), c->n(), name_of(x), text(options)));
  }
  static std::string text(const CaseOptions& options) {
    std::string words;
    for (const auto& [output, input] : options.in_place) words += fmt::format(", {} over {}", output, input);
    return words;
  }

  void call(AnyCase& c, const std::string& what) {
    auto expected = c.expected();
    const int threads = kThreads[random_() % kThreads.size()];
    size_t engine = 0;
    for (cpu::Isa isa : instruction_sets()) {
      const Chosen chosen(isa);
      Row &judged = oracle_[engine], &repeated = repetition_[engine];
      ++engine;
      c.run(pool(1));
      if (program_.adjust) program_.adjust(c, expected);
      judged.take(c.compare(expected), what);
      if (const auto trespass = c.trespass(); trespass && judged.passed()) judged.fault = what + ": " + *trespass;
      const std::vector<std::byte> first = c.memory();
      for (int n : {1, threads}) {
        c.run(pool(n));
        ++repeated.calls;
        if (repeated.passed() && c.memory() != first)
          repeated.fault =
              fmt::format("{}: on {} thread{} other bytes than at first on one", what, n, n > 1 ? "s" : "");
      }
    }
  }

  const Program& program_;
  Random random_;
  std::vector<Row> oracle_, repetition_;  // one for each engine
};

}  // namespace

void Row::take(const Comparison& comparison, const std::string& call) {
  ++calls;
  if (comparison.by_share.share > worst.by_share.share) worst.by_share = comparison.by_share;
  if (comparison.by_ulps.ulps > worst.by_ulps.ulps) {
    worst.by_ulps = comparison.by_ulps;
    worst_call = call;
  }
  if (comparison.passed() || !passed()) return;
  std::ostringstream words;
  words << call << ": " << comparison.by_share;
  fault = words.str();
}

std::vector<Row> verify(const Program& program, const Plan& plan) {
  Trial trial(program, plan.seed);
  for (const Size& size : kSizes)
    if (!trial.faulty()) trial.all_calls(size, plan, CaseOptions{}.padding);
  constexpr int kSizesOfARound = 6;
  for (int i = 0; i < plan.rounds * kSizesOfARound && !trial.faulty(); ++i) trial.random_calls(plan);
  return std::move(trial).rows();
}

std::vector<cpu::Isa> instruction_sets() {
  std::vector<cpu::Isa> sets;
  for (cpu::Isa isa : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512})
    if (cpu::runs_here(isa)) sets.push_back(isa);
  return sets;
}

std::string engine_name(cpu::Isa isa) {
  return "cpu " + std::string(cpu::name(isa));
}

Cpu& pool(int threads) {
  static std::map<int, std::unique_ptr<Cpu>> pools;
  auto& cpu = pools[threads];
  if (!cpu) cpu = std::make_unique<Cpu>(threads);
  return *cpu;
}

}  // namespace coda::verify
