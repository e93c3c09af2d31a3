// coda verify: every program on every engine against the oracle, as a table.
#include "verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "coda/error.h"
#include "commands.h"
#include "option.h"

namespace coda::cli {
namespace {

using verify::Check;
using verify::Derivative;
using verify::Program;
using verify::Programs;
using verify::Row;

constexpr const char* kHelp =
    "Runs every program of the library on every engine that this machine has, on operands of many sizes and strides, "
    "and holds "
    "each element of each output to the program in double precision. Exits with 1 if anything is off.\n\n"
    "  coda verify                          everything, in less than a minute\n"
    "  coda verify SwiGluBackward           one program, with all its options and element types\n"
    "  coda verify 'Residual<bf16>'         with all its options, in bf16\n"
    "  coda verify --rounds 20 --seed 7     more random sizes, and others\n"
    "  compute-sanitizer --tool racecheck coda verify --device cuda --brief Residual\n\n"
    "The worst error is in units of the last place of the output's type (ulp), at the size of its element or, where "
    "terms cancel, "
    "the root mean square of its output. What decides is each element's own bound, grown from the roundings that made "
    "it: the "
    "largest share that an element took of its bound stands beside it. Then backward programs are held to the "
    "derivative of their "
    "forward programs, and all calls must leave the same bytes when they are repeated, on any number of threads and by "
    "tiles of any size.";

struct Arguments {
  std::vector<std::string> programs;
  bool list = false, brief = false;
  verify::Plan plan;
  std::string json;
  std::string device = "cpu";
};

bool wanted(const std::string& program, const std::vector<std::string>& names) {
  return names.empty() ||
         std::ranges::any_of(names, [&](const std::string& name) { return verify::stands_for(name, program); });
}

/// Throws UsageError for a name that no program has.
void check_names(const Programs& programs, const std::vector<std::string>& names) {
  std::vector<std::string_view> families;
  for (const Program& program : programs) {
    const std::string_view family = verify::family(program.name);
    if (std::ranges::find(families, family) == families.end()) families.push_back(family);
  }
  for (const std::string& name : names)
    if (std::ranges::none_of(programs, [&](const Program& program) { return verify::stands_for(name, program.name); }))
      throw UsageError(fmt::format("no program is called {}; there are {}, and with their options those of --list",
                                   name, fmt::join(families, ", ")));
}

std::string ulps(double x) {
  return x < 1000 ? fmt::format("{:.2f} ulp", x) : fmt::format("{:.2g} ulp", x);
}

/// The table as it grows.
class Table {
 public:
  explicit Table(const Programs& programs) {
    for (const Program& program : programs) width_ = std::max(width_, program.name.size());
    for (cpu::Isa isa : verify::instruction_sets())
      engine_width_ = std::max(engine_width_, verify::engine_name(isa).size());
  }

  void title(const char* text) { fmt::print("\n{}\n", text); }
  void add(const Row& row) {
    std::string line = fmt::format("{:<{}}  {:<{}}  {:<6}", row.program, width_, row.engine, engine_width_,
                                   row.passed() ? "pass" : "FAIL");
    if (row.check == Check::repetition) {
      line += fmt::format("  {} calls again", row.calls);
    } else {
      const auto& [by_share, by_ulps] = row.worst;
      line += fmt::format("  {:>9}  {:>5.2f} of bound  {:>4} call{}", ulps(by_ulps.ulps), by_share.share, row.calls,
                          row.calls == 1 ? " " : "s");
      if (by_ulps.ulps > 0)
        line += fmt::format("  {}[{}, {}] of {}", by_ulps.output, by_ulps.row, by_ulps.col, row.worst_call);
      if (row.check == Check::derivative) line += ", of " + row.of;
    }
    fmt::print("{}\n", line);
    if (!row.passed()) fmt::print("    {}\n", row.fault);
    std::fflush(stdout);
    rows_.push_back(row);
  }

  const std::vector<Row>& rows() const { return rows_; }

 private:
  size_t width_ = 0, engine_width_ = 11;
  std::vector<Row> rows_;
};

nlohmann::ordered_json to_json(const Row& row) {
  constexpr const char* kNames[] = {"oracle", "derivative", "repetition"};
  nlohmann::ordered_json json = {{"check", kNames[static_cast<int>(row.check)]}, {"program", row.program}};
  if (row.check == Check::derivative) json["of"] = row.of;
  json["engine"] = row.engine;
  json["calls"] = row.calls;
  json["passed"] = row.passed();
  if (!row.passed()) json["fault"] = row.fault;
  if (row.check != Check::repetition) {
    const verify::Deviation& worst = row.worst.by_ulps;
    json["worst"] = {{"ulps", worst.ulps}, {"output", worst.output}, {"row", worst.row},      {"column", worst.col},
                     {"got", worst.got},   {"want", worst.want},     {"call", row.worst_call}};
    json["share_of_bound"] = row.worst.by_share.share;
  }
  return json;
}

void write_json(const std::string& path, const std::vector<Row>& rows) {
  auto all = nlohmann::ordered_json::array();
  for (const Row& row : rows) all.push_back(to_json(row));
  std::ofstream file(path);
  file << all.dump(1) << '\n';
  file.close();
  if (!file) throw FileError(path, "cannot be written");
}

int list(const Programs& programs) {
  for (const Program& program : programs) fmt::print("{}\n", program.name);
  return 0;
}

int run(const Arguments& arguments, const Programs& programs) {
  if (arguments.list) return list(programs);
  check_names(programs, arguments.programs);
  const auto start = std::chrono::steady_clock::now();
  const bool on_cpu = arguments.device != "cuda";
  if (arguments.brief && on_cpu) throw UsageError("--brief goes with --device cuda");
  verify::Plan plan = arguments.plan;
  if (arguments.brief) {
    plan.rounds = 0;
    plan.every_form = true;
  }
  std::vector<verify::Device> devices;
  if (arguments.device != "cpu")
    devices.push_back(verify::gpu_device(arguments.brief ? verify::Extent::brief : verify::Extent::full));
  if (on_cpu) devices.push_back(verify::cpu_device());
  std::vector<std::string> engines;
  for (const verify::Device& device : devices)
    for (const auto& engine : device.engines) engines.push_back(engine->name());
  fmt::print("on {}; seed {}, {} random round{}\n", fmt::join(engines, ", "), plan.seed, plan.rounds,
             plan.rounds == 1 ? "" : "s");

  Table table(programs);
  std::vector<Row> repetitions;
  table.title("programs, against the oracle in double precision");
  for (const Program& program : programs) {
    if (!wanted(program.name, arguments.programs)) continue;
    for (const verify::Device& device : devices)
      for (Row& row : verify::verify(program, plan, device)) {
        if (row.check == Check::repetition)
          repetitions.push_back(std::move(row));
        else
          table.add(row);
      }
  }
  if (table.rows().empty())
    throw UsageError("none of these programs has kernels for a GPU: those in bf16 of src/kernels/*.cu have");
  bool titled = false;
  for (const Derivative& derivative : programs.derivatives()) {
    if (!on_cpu) break;  // the formula is one for all engines, and the oracle holds them to it
    if (!wanted(derivative.program, arguments.programs)) continue;
    if (!titled)
      table.title("backward programs, against the derivative of their forward programs by dual numbers (vjp)");
    titled = true;
    for (const Row& row : derivative.verify(plan.seed)) table.add(row);
  }
  table.title(on_cpu            ? "bitwise repetition: each call again, and on 2, 3 or 5 threads"
              : arguments.brief ? "bitwise repetition: each call twice"
                                : "bitwise repetition: each call 20 times, and by every plan");
  for (const Row& row : repetitions) table.add(row);

  const auto failed = std::ranges::count_if(table.rows(), [](const Row& row) { return !row.passed(); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("\n{} of {} rows passed, {:.1f} s\n", table.rows().size() - failed, table.rows().size(), seconds.count());
  if (!arguments.json.empty()) write_json(arguments.json, table.rows());
  return failed > 0 ? 1 : 0;
}

}  // namespace

Command verify_command(CLI::App& coda, std::function<const verify::Programs&()> programs) {
  CLI::App* app = coda.add_subcommand("verify", kHelp);
  const auto a = std::make_shared<Arguments>();
  app->add_option("PROGRAM", a->programs, "by name, with its options or without [all]")->option_text(" ");
  app->add_flag("--list", a->list, "print the names of the programs and do nothing else")->option_text(" ");
  show_default(app->add_option("--device", a->device, "whose engines: cpu, cuda or all")
                   ->option_text("D")
                   ->check(CLI::IsMember({"cpu", "cuda", "all"})));
  show_default(app->add_option("--seed", a->plan.seed, "of operands and random sizes")->option_text("S"));
  show_default(app->add_option("--rounds", a->plan.rounds, "of random sizes, 6 a round, after those always tried")
                   ->option_text("N")
                   ->check(CLI::Range(0, 1000000, "0 or more")));
  app->add_flag("--brief", a->brief,
                "on a GPU every kernel at a few sizes, each call twice: what compute-sanitizer has time for")
      ->option_text(" ");
  app->add_option("--json", a->json, "the rows, as an array of objects")->option_text("FILE");
  return {app, [a, programs = std::move(programs)] { return run(*a, programs()); }};
}

}  // namespace coda::cli
