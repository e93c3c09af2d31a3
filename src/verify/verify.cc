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
  coda::detail::Form form;
};
constexpr std::array kForms = {Form{Order::plain, Order::plain, "TN", coda::detail::Form::TN},
                               Form{Order::plain, Order::transposed, "NN", coda::detail::Form::NN},
                               Form{Order::transposed, Order::transposed, "NT", coda::detail::Form::NT}};
constexpr auto kFloat = ElementType::float32, kBf16 = ElementType::bfloat16;
constexpr std::array kMixtures = {std::pair{kFloat, kFloat}, std::pair{kBf16, kBf16}, std::pair{kFloat, kBf16},
                                  std::pair{kBf16, kFloat}};

/// One of the CPU's instruction sets.
class CpuEngine : public Engine {
 public:
  explicit CpuEngine(cpu::Isa isa) : isa_(isa) {}
  std::string name() const override { return engine_name(isa_); }
  std::vector<Way> ways(AnyCase& /*c*/) override { return {on(1)}; }
  std::vector<Way> again(AnyCase& /*c*/, Random& random) override {
    return {on(1), on(kThreads[random() % kThreads.size()])};
  }

 private:
  Way on(int threads) {
    return {fmt::format("on {} thread{}", threads, threads > 1 ? "s" : ""), [this, threads](AnyCase& c) {
              const Chosen chosen(isa_);
              c.run(pool(threads));
            }};
  }

  cpu::Isa isa_;
};

/// The rows of one program as they grow.
class Trial {
 public:
  Trial(const Program& program, uint64_t seed, const Device& device)
      : program_(program), device_(device), random_(seed ^ seed_of(program.name)) {
    for (const auto& engine : device.engines) {
      oracle_.push_back({.check = Check::oracle, .program = program.name, .engine = engine->name()});
      repetition_.push_back({.check = Check::repetition, .program = program.name, .engine = engine->name()});
    }
    const coda::detail::HopperKernels* kernels = device.gpu ? program.hopper() : nullptr;
    for (size_t form = 0; form < kForms.size(); ++form)
      if (!device.gpu || (kernels != nullptr && std::ranges::count(kernels->products, kForms[form].form,
                                                                   &coda::detail::HopperKernel::form) > 0))
        forms_.push_back(form);
    maps_ = !device.gpu || (kernels != nullptr && kernels->map != nullptr);
    for (size_t mixture = 0; mixture < kMixtures.size(); ++mixture)
      if (!device.gpu || kMixtures[mixture] == std::pair{kBf16, kBf16}) mixtures_.push_back(mixture);
  }

  bool nothing_to_call() const { return forms_.empty() && !maps_; }

  /// The products that plan asks for, all the maps, and the program's own forms in place.
  void all_calls(const Size& size, const Plan& plan, int64_t padding) {
    const bool products = plan.products && !forms_.empty(), maps = plan.maps && maps_;
    // The GPU's fused kernels take what TMA can load and store; what it cannot goes another way.
    if (device_.gpu) all_calls(size, plan, padding, products, maps, true);
    all_calls(size, plan, padding, products, maps, false);
  }
  /// Mostly with tails, now and then 0 or 1; strides odd and even.
  void random_calls(const Plan& plan) {
    const Size size{random_size(200), random_size(300), random_size(600)};
    all_calls(size, plan, static_cast<int64_t>(uniform(random_, 0, 10)));
  }

  void all_calls(const Size& size, const Plan& plan, int64_t padding, bool products, bool maps, bool aligned) {
    const CaseOptions apart{padding, {}, aligned};
    if (products) {
      for (size_t form : plan.every_form ? forms_ : std::vector<size_t>{})
        for (size_t mixture : mixtures_) product(size, form, mixture, apart);
      if (!plan.every_form) product(size, apart);
    }
    if (maps) map(size, random_() % 2 == 0 ? kFloat : kBf16, apart);
    for (const InPlace& alias : program_.in_place) {
      const CaseOptions options{padding, {{alias.output, alias.input}}, aligned};
      if (alias.input != kMapped && products) product(size, options);
      if (alias.input == kMapped && maps) map(size, element_of(alias.output), options);
    }
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
    const size_t form = forms_[random_() % forms_.size()];
    product(size, form, mixtures_[random_() % mixtures_.size()], options);
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
    if (options.aligned) words += ", aligned";
    return words;
  }

  void call(AnyCase& c, const std::string& what) {
    auto expected = c.expected(device_.arithmetic);
    const Assume assume(device_.arithmetic);
    for (size_t i = 0; i < device_.engines.size(); ++i) {
      Engine& engine = *device_.engines[i];
      Row &judged = oracle_[i], &repeated = repetition_[i];
      const std::vector<Way> ways = engine.ways(c);
      std::vector<std::byte> first;
      const auto repeats = [&](const Way& way, const Way& earlier, const std::vector<std::byte>& bytes) {
        ++repeated.calls;
        if (repeated.passed() && c.memory() != bytes)
          repeated.fault = fmt::format("{}: {} other bytes than at first {}", what, way.name, earlier.name);
      };
      const auto runs = [&](const Way& way, Row& row) {
        try {
          way.run(c);
        } catch (const DeviceError& error) {  // after which nothing runs on the device
          throw DeviceError(fmt::format("{}, {}, {}: {}", program_.name, what, way.name, error.what()));
        } catch (const Error& error) {
          if (row.passed()) row.fault = fmt::format("{}, {}: {}", what, way.name, error.what());
        }
        return row.passed();
      };
      for (const Way& way : ways) {
        if (!runs(way, judged)) break;
        if (program_.adjust) program_.adjust(c, expected);
        judged.take(c.compare(expected), ways.size() > 1 ? what + ", " + way.name : what);
        if (const auto trespass = c.trespass(); trespass && judged.passed()) judged.fault = what + ": " + *trespass;
        if (way.own_order) {
          const std::vector<std::byte> bytes = c.memory();
          if (!runs(way, repeated)) break;
          repeats(way, way, bytes);
        } else if (first.empty()) {
          first = c.memory();
        } else {
          repeats(way, ways.front(), first);
        }
      }
      for (const Way& way : engine.again(c, random_)) {
        if (!judged.passed() || !runs(way, repeated)) break;
        repeats(way, ways.front(), first);
      }
    }
  }

  const Program& program_;
  const Device& device_;
  Random random_;
  std::vector<size_t> forms_, mixtures_;  // of kForms and kMixtures
  bool maps_;
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

bool gpu_half_is_linked() {
  std::unique_ptr<Engine> (*volatile engine)(Extent) = &gpu_engine;  // see linked_hopper_kernels
  return engine != nullptr;
}

Device cpu_device() {
  Device device{.engines = {}, .sizes = kSizes, .arithmetic = kLanes, .gpu = false};
  for (cpu::Isa isa : instruction_sets()) device.engines.push_back(std::make_unique<CpuEngine>(isa));
  return device;
}

Device gpu_device(Extent extent) {
  if (!gpu_half_is_linked()) throw UsageError("this coda was built without its GPU half: `make cuda` builds it");
  Device device{.engines = {}, .sizes = kGpuSizes, .arithmetic = kHopperArithmetic, .gpu = true};
  if (extent == Extent::brief) device.sizes = kBriefGpuSizes;
  try {
    device.engines.push_back(gpu_engine(extent));
  } catch (const DeviceError& error) {
    throw UsageError(error.what());
  }
  return device;
}

std::vector<Row> verify(const Program& program, const Plan& plan) {
  return verify(program, plan, cpu_device());
}

std::vector<Row> verify(const Program& program, const Plan& plan, const Device& device) {
  Trial trial(program, plan.seed, device);
  if (trial.nothing_to_call()) return {};
  for (const Size& size : device.sizes)
    if (!trial.faulty()) trial.all_calls(size, plan, CaseOptions{}.padding);
  constexpr int kSizesOfARound = 6;
  for (int i = 0; i < plan.rounds * kSizesOfARound && !trial.faulty(); ++i) trial.random_calls(plan);
  return std::move(trial).rows();
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
