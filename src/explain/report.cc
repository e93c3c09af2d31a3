#include "explain/report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "explain/table.h"
#include "operand_shape.h"

namespace coda::explain {
namespace {

using nlohmann::ordered_json;
using Lines = std::vector<std::vector<std::string>>;

/// RowSum<float, 128>, Tile<bf16>, number.
std::string kind_text(const Field& field) {
  const auto of = [&](const char* kind) {
    return field.extent > 0 ? fmt::format("{}<{}, {}>", kind, name(field.element), field.extent)
                            : fmt::format("{}<{}>", kind, name(field.element));
  };
  switch (field.kind) {
    case Kind::per_row:
      return of("PerRow");
    case Kind::per_col:
      return of("PerCol");
    case Kind::per_pair:
      return of("PerPair");
    case Kind::scalar:
      return of("Scalar");
    case Kind::device_scalar:
      return of("DeviceScalar");
    case Kind::tile:
      return of("Tile");
    case Kind::half_tile:
      return of("HalfTile");
    case Kind::double_tile:
      return of("DoubleTile");
    case Kind::accumulate:
      return of("Accumulate");
    case Kind::row_sum:
      return of("RowSum");
    case Kind::row_max:
      return of("RowMax");
    case Kind::col_sum:
      return of("ColSum");
    case Kind::row_log_sum_exp:
      return fmt::format("RowLogSumExp<{}>", field.extent);
    case Kind::off:
      return "off";
    case Kind::number:
      break;
  }
  return of("number");
}

bool is_reduction(const Field& field) {
  return field.extent > 0;
}

const char* use_text(const Field& field) {
  if (field.kind == Kind::off) return "switched off";
  if (field.direction == Direction::local) return "reduced on chip";
  if (field.direction == Direction::in) return "read";
  if (field.kind == Kind::accumulate) return "read, written";
  return is_reduction(field) ? "reduced, written" : "written";
}

std::string formula_text(const Field& field) {
  if (detail::has_no_memory(field)) return "–";
  const std::string_view formula = detail::needed_shape(field, 1, 16).formula;
  if (!is_reduction(field)) return std::string(formula);
  return field.kind == Kind::col_sum ? fmt::format("[⌈M/{}⌉, N]", field.extent)
                                     : fmt::format("[⌈N/{}⌉, M]", field.extent);
}

struct OperandSize {
  std::string shape = "–";
  int64_t bytes = 0;
};
OperandSize operand_size(const Field& field, const Sizes& sizes) {
  if (detail::has_no_memory(field)) return {};
  const detail::OperandShape shape = detail::needed_shape(field, sizes.m, sizes.n);
  const bool vector = field.kind == Kind::per_row || field.kind == Kind::per_col || field.kind == Kind::per_pair;
  return {vector ? fmt::format("[{}]", shape.cols) : fmt::format("[{}, {}]", shape.rows, shape.cols),
          shape.rows * shape.cols * detail::bytes_of(field.element)};
}

std::string ratio_text(double separate, double fused) {
  return fmt::format("{:.2f}×", separate / fused);
}

std::string machine_text(const Machine& machine) {
  return fmt::format("{}: {}, {} ({})", machine.name, rate_text(machine.flops_per_second, "FLOP"),
                     rate_text(machine.bytes_per_second, "B"), machine.source);
}

constexpr const char* kTimeModel =
    "time of a kernel = max(FLOPs / rate, bytes / bandwidth); kernels run one after the other. It knows no launch, no "
    "ramp\n"
    "and no cache: a bound to compare by, not a forecast.\n";
constexpr const char* kByteModel =
    "A tensor counts once for each kernel that reads it and once for each that writes it; FLOPs are the products'.\n";

std::string kernel_line(const Kernel& kernel) {
  return fmt::format("{} reads {}, writes {}", kernel.name, bytes_text(kernel.read), bytes_text(kernel.written));
}

int64_t bytes_of(const std::vector<Kernel>& kernels) {
  int64_t sum = 0;
  for (const Kernel& kernel : kernels) sum += kernel.bytes();
  return sum;
}

std::string form_text(const Row& row) {
  if (row.step != Step::product) return "";
  return row.form == Form::tn ? "TN" : row.form == Form::nn ? "NN" : "NT";
}

std::string shape_text(const Row& row) {
  if (row.step == Step::product) return fmt::format("{} × {} × {}", row.sizes.m, row.sizes.n, *row.sizes.k);
  if (row.step == Step::elementwise) return fmt::format("{} × {}", row.sizes.m, row.sizes.n);
  return "";
}

std::string mnk_text(const hopper::Shape& shape) {
  return fmt::format("{} × {} × {}", shape.m, shape.n, shape.k);
}

std::string card_text(const Card& card) {
  return fmt::format("{}, {} multiprocessors", card.name, card.multiprocessors);
}

/// A line for a coda that could not run what it explains.
std::string without_gpu_half() {
  // volatile: g++ 12 folds the comparison of a declared function with null, weak or not.
  Card (*volatile card)() = &current_card;
  return card != nullptr ? "" : "this coda was built without its GPU half, which `make cuda` builds\n";
}

std::string why_chosen(const GpuPlan& plan) {
  return plan.tuned ? "chosen: tuned" : "chosen: least score";
}

/// Scores as multiples of the least one.
double relative_score(const GpuPlan& plan, const hopper::Candidate& candidate) {
  return candidate.score / plan.candidates.front().score;
}

/// Every candidate: its score and what it lost by.
std::string gpu_plan_text(const GpuPlan& plan, const Card& card) {
  std::string out = fmt::format("plans of the GPU engine for {} {} ({})\n", mnk_text(plan.shape),
                                hopper::name(plan.form), card_text(card));
  Lines lines = {{"  tile", "order", "score", "", ""}};
  for (const hopper::Candidate& c : plan.candidates) {
    const std::string chosen = &c == &plan.choice() ? why_chosen(plan) : "";
    lines.push_back({fmt::format("  {}", hopper::name(c.kernel->tile)), fmt::format("{} rows of clusters", c.band),
                     fmt::format("{:.3f}", relative_score(plan, c)), chosen, c.reason});
  }
  return out + table(lines, "llrll");
}

/// A line a product: what is chosen, and the best of the others.
std::string gpu_plans_text(const std::vector<RowPlan>& plans, const Card& card) {
  Lines lines = {{"row", "program", "M × N × K", "form", "plan", "", "next", ""}};
  for (const RowPlan& row : plans) {
    const GpuPlan& plan = row.plan;
    const hopper::Candidate& choice = plan.choice();
    std::vector<std::string> line = {row.row,
                                     row.program,
                                     mnk_text(plan.shape),
                                     hopper::name(plan.form),
                                     hopper::text_of(choice.kernel->tile, choice.band),
                                     plan.tuned ? "tuned" : "untuned"};
    for (const hopper::Candidate& next : plan.candidates) {
      if (&next == &choice) continue;
      line.push_back(hopper::text_of(next.kernel->tile, next.band));
      line.push_back(next.reason.empty() ? "the least score" : next.reason);
      break;
    }
    line.resize(8);
    lines.push_back(std::move(line));
  }
  return fmt::format("plans of the GPU engine ({})\n", card_text(card)) + table(lines, "llllllll");
}

std::string memory_text(const llama::GpuMemory& memory) {
  Lines lines;
  const auto add = [&](const std::string& head, const std::vector<llama::MemoryPiece>& pieces, double bytes,
                       const std::string& said) {
    lines.push_back({head, ""});
    for (const llama::MemoryPiece& piece : pieces)
      lines.push_back({"  " + piece.what, bytes_text(static_cast<int64_t>(piece.bytes))});
    lines.push_back({"  " + said, bytes_text(static_cast<int64_t>(bytes))});
  };
  const double kept = static_cast<double>(memory.layers) * llama::sum(memory.layer);
  add("kept of every layer for its backward pass", memory.layer, llama::sum(memory.layer), "a layer");
  lines.push_back({fmt::format("  {} layers", memory.layers), bytes_text(static_cast<int64_t>(kept))});
  add("once for all layers", memory.pass, llama::sum(memory.pass), "together");
  add("the model", memory.model, llama::sum(memory.model), "together");
  lines.push_back({"in all", bytes_text(static_cast<int64_t>(memory.total()))});
  return "memory of a GPU that trains this; y and attention's scores are made again\n" + table(lines, "lr");
}

ordered_json json(const llama::GpuMemory& memory) {
  const auto pieces = [](const std::vector<llama::MemoryPiece>& list) {
    ordered_json out;
    for (const llama::MemoryPiece& piece : list) out[piece.what] = static_cast<int64_t>(piece.bytes);
    return out;
  };
  return {{"layers", memory.layers},
          {"layer", pieces(memory.layer)},
          {"once", pieces(memory.pass)},
          {"model", pieces(memory.model)},
          {"kept_by_all_layers", static_cast<int64_t>(static_cast<double>(memory.layers) * llama::sum(memory.layer))},
          {"in_all", static_cast<int64_t>(memory.total())}};
}

ordered_json json(const GpuPlan& plan) {
  ordered_json out = {{"form", hopper::name(plan.form)},
                      {"mnk", {plan.shape.m, plan.shape.n, plan.shape.k}},
                      {"tuned", plan.tuned},
                      {"chosen", plan.chosen}};
  for (const hopper::Candidate& c : plan.candidates)
    out["candidates"].push_back({{"tile", hopper::name(c.kernel->tile)},
                                 {"band", c.band},
                                 {"score", relative_score(plan, c)},
                                 {"reason", c.reason}});
  return out;
}

std::string kept_text(const std::vector<Tensor>& kept) {
  if (kept.empty()) return "";
  std::string names;
  int64_t bytes = 0;
  for (const Tensor& tensor : kept) {
    names += (names.empty() ? "" : ", ") + tensor.name;
    bytes += tensor.bytes();
  }
  return fmt::format("{}: {}", names, bytes_text(bytes));
}

std::string block_title(const Block& b) {
  return fmt::format(
      "A Llama layer in {}: {} tokens in documents of {}, hidden {}, ffn {}, {} heads and {} key-value heads of {}{}",
      name(b.element), b.tokens, b.seq, b.hidden, b.ffn, b.heads, b.kv_heads, b.head_dim,
      b.vocab ? fmt::format("\nand the loss over a vocabulary of {}, {} tokens at a time", *b.vocab, b.chunk) : "");
}

ordered_json json(const Kernel& kernel, const std::optional<Machine>& machine) {
  ordered_json out = {
      {"name", kernel.name}, {"flops", kernel.flops}, {"read", kernel.read}, {"written", kernel.written}};
  if (machine) out["seconds"] = machine->seconds(kernel);
  return out;
}

ordered_json json(const std::vector<Kernel>& kernels, const std::optional<Machine>& machine) {
  ordered_json out = ordered_json::array();
  for (const Kernel& kernel : kernels) out.push_back(json(kernel, machine));
  return out;
}

ordered_json json(const Machine& machine) {
  return {{"name", machine.name},
          {"flops_per_second", machine.flops_per_second},
          {"bytes_per_second", machine.bytes_per_second},
          {"source", machine.source}};
}

ordered_json json(const Sum& sum, const std::optional<Machine>& machine) {
  ordered_json out = {{"flops", sum.flops}, {"read", sum.read}, {"written", sum.written}};
  if (machine) out["seconds"] = sum.seconds;
  return out;
}

ordered_json json(const std::vector<Tensor>& tensors) {
  ordered_json out = ordered_json::array();
  for (const Tensor& tensor : tensors) {
    out.push_back({{"name", tensor.name},
                   {"shape", {tensor.rows, tensor.cols}},
                   {"type", name(tensor.element)},
                   {"bytes", tensor.bytes()}});
  }
  return out;
}

/// The parts of a block that are added up, by the names of the output.
struct NamedPart {
  const char* name;
  Part part;
};
std::vector<NamedPart> parts_of(const Block& block) {
  std::vector<NamedPart> parts = {{"layer, forward", Part::layer_forward},
                                  {"layer, backward", Part::layer_backward},
                                  {"layer", Part::layer},
                                  {"attention", Part::attention}};
  if (block.vocab) parts.push_back({"loss", Part::loss});
  parts.push_back({"all", Part::all});
  return parts;
}

std::string totals_text(const BlockReport& report) {
  const bool timed = report.machine.has_value();
  Lines lines = {{"total", "FLOPs", "fused", "separate", "", "compiled", ""}};
  std::string alignment = "lrrrrrr";
  if (timed) {
    lines[0].insert(lines[0].end(), {"time", "separate", "", "compiled", ""});
    alignment += "rrrrr";
  }
  for (const NamedPart& part : parts_of(report.block)) {
    const Totals t = total(report.rows, part.part, report.machine);
    const auto bytes = [](const Sum& sum) { return static_cast<double>(sum.bytes()); };
    std::vector<std::string> line = {part.name,
                                     flops_text(t.fused.flops),
                                     bytes_text(t.fused.bytes()),
                                     bytes_text(t.separate.bytes()),
                                     ratio_text(bytes(t.separate), bytes(t.fused)),
                                     bytes_text(t.compiled.bytes()),
                                     ratio_text(bytes(t.compiled), bytes(t.fused))};
    if (timed) {
      line.insert(line.end(), {time_text(t.fused.seconds), time_text(t.separate.seconds),
                               ratio_text(t.separate.seconds, t.fused.seconds), time_text(t.compiled.seconds),
                               ratio_text(t.compiled.seconds, t.fused.seconds)});
    }
    lines.push_back(std::move(line));
  }
  const Totals all = total(report.rows, Part::all, report.machine);
  return table(lines, alignment) +
         fmt::format("kept for the backward pass: {} fused, {} separate ({})\n", bytes_text(all.kept),
                     bytes_text(all.kept_separate),
                     ratio_text(static_cast<double>(all.kept_separate), static_cast<double>(all.kept)));
}

}  // namespace

std::string text(const ProgramReport& report) {
  const Program& p = report.program;
  std::string out = fmt::format("{}:  {}\n", p.spelling(), p.formula);
  out += fmt::format(
      "{}; {}; {}\n\n",
      p.pairs ? "takes pairs of columns, so N is a multiple of 16" : "takes one accumulator at a time",
      p.passes == 0   ? std::string("one pass")
      : p.passes == 1 ? std::string("a measure pass first, over the same accumulators")
                      : fmt::format("{} measure passes first, over the same accumulators", p.passes),
      p.col_group > 1 || p.row_group > 1
          ? fmt::format("reduces over groups of {}",
                        p.row_group == 1   ? fmt::format("{} columns", p.col_group)
                        : p.col_group == 1 ? fmt::format("{} rows", p.row_group)
                                           : fmt::format("{} columns and {} rows", p.col_group, p.row_group))
          : "no groups");

  const bool sized = report.sizes.has_value();
  const bool mapped = sized && !report.sizes->k;
  Lines lines = {{"operand", "kind", "use", "shape"}};
  std::string alignment = "llll";
  if (sized) {
    lines[0].insert(lines[0].end(), {"", "bytes"});
    alignment += "rr";
  }
  const std::string factor = fmt::format("factor<{}>", name(p.element));
  const auto add_factor = [&](const char* operand, const char* formula, int64_t rows, int64_t cols) {
    lines.push_back({operand, mapped ? fmt::format("stored<{}>", name(p.element)) : factor, "read", formula});
    if (sized) {
      lines.back().insert(lines.back().end(), {fmt::format("[{}, {}]", rows, cols),
                                               bytes_text(Tensor{operand, rows, cols, p.element}.bytes())});
    }
  };
  const Sizes sizes = report.sizes.value_or(Sizes{1, 1, 1});
  if (mapped) {
    add_factor("x", "[M, N]", sizes.m, sizes.n);
  } else {
    add_factor("a", "[M, K]", sizes.m, *sizes.k);
    add_factor("b", "[N, K]", sizes.n, *sizes.k);
  }
  for (const Field& field : p.fields) {
    lines.push_back({std::string(field.name), kind_text(field), use_text(field), formula_text(field)});
    if (sized) {
      const OperandSize size = operand_size(field, sizes);
      lines.back().insert(lines.back().end(), {size.shape, size.bytes > 0 ? bytes_text(size.bytes) : "–"});
    }
  }
  out += table(lines, alignment) + "\n";

  if (sized) {
    const Kernel one = fused(p, sizes, p.element);
    const std::vector<Kernel> parts = separate_pass(p, sizes, p.element);
    out += mapped ? "without --k: over a stored matrix (map), no product\n"
                  : fmt::format("product   2·M·N·K = {}\n", flops_text(one.flops));
    out += fmt::format("fused     one kernel: reads {}, writes {}; {} in all\n", bytes_text(one.read),
                       bytes_text(one.written), bytes_text(one.bytes()));
    if (parts.size() == 1) {
      out += mapped ? "unfused   the same: it is a pass of its own\n"
                    : "unfused   the same: a product's own store does what this program does\n";
    } else {
      out += fmt::format(
          "unfused   the product stores its accumulators once, in {}, and one pass reads them back, everything else "
          "the same:\n"
          "          {}; {}; {} in all, {} the fused\n",
          name(p.element), kernel_line(parts[0]), kernel_line(parts[1]), bytes_text(bytes_of(parts)),
          ratio_text(static_cast<double>(bytes_of(parts)), static_cast<double>(one.bytes())));
    }
    if (report.machine) {
      const double alone = report.machine->seconds(one), apart = report.machine->seconds(parts);
      out += fmt::format("time      {} fused, {} unfused, {} the fused\n          {}\n", time_text(alone),
                         time_text(apart), ratio_text(apart, alone), machine_text(*report.machine));
    }
    out += std::string("\n") + kByteModel + (report.machine ? kTimeModel : "") + "\n";
  }

  out += "plan of the CPU engine\n";
  Lines plan;
  for (const Decision& d : report.plan) plan.push_back({"  " + d.what, d.choice, d.reason});
  out += table(plan, "lll");
  if (report.card) {
    out += "\n" + without_gpu_half();
    for (const GpuPlan& plan : report.gpu_plans) out += gpu_plan_text(plan, *report.card) + "\n";
    if (report.gpu_plans.empty())
      out += fmt::format("plans of the GPU engine: src/kernels compiles no such product of {}\n", p.spelling());
  }
  return out;
}

std::string text(const BlockReport& report) {
  std::string out = block_title(report.block) + "\n\n";

  Lines what = {{"row", "product", "M × N × K", "form", "program", "kept for backward"}};
  for (const Row& row : report.rows) {
    what.push_back({row.name, row.what, shape_text(row), form_text(row),
                    row.program != nullptr ? row.program->spelling() : row.formula, kept_text(row.kept)});
  }
  out += table(what, "llllll") + "\n";

  const bool timed = report.machine.has_value();
  Lines costs = {{"row", "FLOPs", "reads", "writes", "separate: reads", "writes", "compiled: reads", "writes"}};
  std::string alignment = "lrrrrrrr";
  if (timed) {
    costs[0].insert(costs[0].end(), {"time", "separate", "compiled"});
    alignment += "rrr";
  }
  for (const Row& row : report.rows) {
    const auto sum = [](const std::vector<Kernel>& kernels, int64_t Kernel::*bytes) {
      int64_t total = 0;
      for (const Kernel& kernel : kernels) total += kernel.*bytes;
      return kernels.empty() ? std::string("–") : bytes_text(total);
    };
    std::vector<std::string> line = {row.name,
                                     row.fused.flops > 0 ? flops_text(row.fused.flops) : "–",
                                     bytes_text(row.fused.read),
                                     bytes_text(row.fused.written),
                                     sum(row.separate, &Kernel::read),
                                     sum(row.separate, &Kernel::written),
                                     sum(row.compiled, &Kernel::read),
                                     sum(row.compiled, &Kernel::written)};
    if (timed) {
      const auto time = [&](const std::vector<Kernel>& kernels) {
        return kernels.empty() ? std::string("–") : time_text(report.machine->seconds(kernels));
      };
      line.insert(line.end(), {time_text(report.machine->seconds(row.fused)), time(row.separate), time(row.compiled)});
    }
    costs.push_back(std::move(line));
  }
  out += table(costs, alignment) + "\n" + totals_text(report) + "\n";

  if (report.card) out += without_gpu_half() + gpu_plans_text(report.gpu_plans, *report.card) + "\n";
  if (report.memory) out += memory_text(*report.memory) + "\n";

  if (timed) out += machine_text(*report.machine) + "\n" + kTimeModel;
  out += kByteModel;
  out +=
      "fused     each row one kernel, its program in the product's epilogue; what is kept is all that is kept\n"
      "separate  one kernel per operator: GEMM, residual add, RMSNorm, SwiGLU, RoPE, cross-entropy, their derivatives\n"
      "compiled  everything between two products as one kernel, as torch.compile makes it\n"
      "layer     is without attention, which stands by itself\n"
      "In all three: the same attention, weight gradients stored in float, no optimizer.\n";
  if (report.block.vocab) {
    out += fmt::format(
        "The loss: {} chunks, for each of which the vocabulary's weight is read twice and its float gradient added to; "
        "separate\n"
        "and compiled hold all logits at once. --chunk sets the tokens of a chunk.\n",
        report.block.chunks());
  }
  if (!timed) out += "For predicted times: --machine h100, h200 or this, or --tflops and --tbps.\n";
  return out;
}

ordered_json json(const ProgramReport& report) {
  const Program& p = report.program;
  ordered_json out = {{"program", p.spelling()}, {"formula", p.formula},     {"pairs", p.pairs},
                      {"passes", p.passes},      {"col_group", p.col_group}, {"row_group", p.row_group}};
  ordered_json operands = ordered_json::array();
  for (const Field& field : p.fields) {
    ordered_json operand = {
        {"name", field.name}, {"kind", kind_text(field)}, {"use", use_text(field)}, {"shape", formula_text(field)}};
    if (report.sizes) operand["bytes"] = operand_size(field, *report.sizes).bytes;
    operands.push_back(std::move(operand));
  }
  out["operands"] = std::move(operands);
  if (report.sizes) {
    out["m"] = report.sizes->m;
    out["n"] = report.sizes->n;
    out["k"] = report.sizes->k ? ordered_json(*report.sizes->k) : ordered_json(nullptr);
    out["fused"] = json(fused(p, *report.sizes, p.element), report.machine);
    out["unfused"] = json(separate_pass(p, *report.sizes, p.element), report.machine);
  }
  if (report.machine) out["machine"] = json(*report.machine);
  ordered_json plan = ordered_json::array();
  for (const Decision& d : report.plan) plan.push_back({{"what", d.what}, {"choice", d.choice}, {"reason", d.reason}});
  out["plan"] = std::move(plan);
  if (report.card) {
    out["card"] = report.card->name;
    out["gpu_plans"] = ordered_json::array();
    for (const GpuPlan& one : report.gpu_plans) out["gpu_plans"].push_back(json(one));
  }
  return out;
}

ordered_json json(const BlockReport& report) {
  const Block& b = report.block;
  ordered_json out = {{"tokens", b.tokens},     {"seq", b.seq},           {"hidden", b.hidden},
                      {"ffn", b.ffn},           {"heads", b.heads},       {"kv_heads", b.kv_heads},
                      {"head_dim", b.head_dim}, {"type", name(b.element)}};
  if (b.vocab) {
    out["vocab"] = *b.vocab;
    out["chunk"] = b.chunk;
  }
  if (report.machine) out["machine"] = json(*report.machine);
  ordered_json rows = ordered_json::array();
  for (const Row& row : report.rows) {
    ordered_json line = {{"name", row.name}, {"pass", row.backward ? "backward" : "forward"}, {"product", row.what}};
    if (row.step == Step::product) {
      line["form"] = form_text(row);
      line["mnk"] = {row.sizes.m, row.sizes.n, *row.sizes.k};
    }
    if (row.program != nullptr) line["program"] = row.program->spelling();
    line["formula"] = row.formula;
    line["fused"] = json(row.fused, report.machine);
    line["separate"] = json(row.separate, report.machine);
    line["compiled"] = json(row.compiled, report.machine);
    line["kept"] = json(row.kept);
    line["kept_separate"] = json(row.kept_separate);
    rows.push_back(std::move(line));
  }
  out["rows"] = std::move(rows);
  for (const NamedPart& part : parts_of(b)) {
    const Totals t = total(report.rows, part.part, report.machine);
    out["totals"][part.name] = {{"fused", json(t.fused, report.machine)},
                                {"separate", json(t.separate, report.machine)},
                                {"compiled", json(t.compiled, report.machine)},
                                {"kept", t.kept},
                                {"kept_separate", t.kept_separate}};
  }
  if (report.card) {
    out["card"] = report.card->name;
    for (const RowPlan& one : report.gpu_plans) {
      ordered_json plan = {{"row", one.row}, {"program", one.program}};
      plan.update(json(one.plan));
      out["gpu_plans"].push_back(std::move(plan));
    }
  }
  if (report.memory) out["gpu_memory"] = json(*report.memory);
  return out;
}

std::string program_list() {
  Lines lines;
  for (const Program& program : programs()) lines.push_back({program.spelling(), program.formula});
  return table(lines, "ll");
}

}  // namespace coda::explain
