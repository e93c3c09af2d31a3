#include "gpu_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace coda::bench {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kSingleShapeBar = 1.03;
constexpr double kNoise = 1.01;  // two errors that are the same up to the order of sums

double tflops(const GpuCase& product, const Time& time) {
  return 1e-12 * product.flops() / time.median;
}

/// Of those that are known.
double median_known(std::vector<double> values) {
  std::erase_if(values, [](double x) { return std::isnan(x); });
  return values.empty() ? kNan : median(std::move(values));
}
double median_mhz(const GpuRegime& regime) {
  std::vector<double> all;
  for (const GpuTimes& times : regime) all.insert(all.end(), times.mhz.begin(), times.mhz.end());
  return median_known(std::move(all));
}
double median_watts(const GpuRegime& regime) {
  std::vector<double> all;
  for (const GpuTimes& times : regime) all.insert(all.end(), times.watts.begin(), times.watts.end());
  return median_known(std::move(all));
}

std::string shape_of(const GpuCase& product) {
  const std::string slices = product.slices > 1 ? fmt::format(" / {}", product.slices) : "";
  return fmt::format("{}, {}, {}{} {}", product.m, product.n, product.k, slices, name(product.row->form));
}

Json json_of(const GpuCase& product, const GpuRegime& regime) {
  Json json;
  for (const GpuTimes& t : regime)
    json["times"][t.name] = {{"median_s", t.time.median},
                             {"low_s", t.time.low},
                             {"high_s", t.time.high},
                             {"rounds_s", t.time.rounds},
                             {"sm_mhz", t.mhz},
                             {"watts", t.watts},
                             {"median_mhz", median_known(t.mhz)},
                             {"tflops", tflops(product, t.time)}};
  json["ratio_to_cublas"] = to_cublas(regime);
  json["ratio_to_best"] = to_best(regime);
  return json;
}

}  // namespace

double to_cublas(const GpuRegime& regime) {
  return regime.size() > 1 ? ratio(regime[0].time, regime[1].time) : kNan;
}
double to_best(const GpuRegime& regime) {
  return regime.size() > 2 ? ratio(regime[0].time, regime[2].time) : kNan;
}

std::vector<GpuMean> gpu_means(const GpuReport& report) {
  std::vector<GpuMean> means;
  for (const GpuRow& row : gpu_rows()) {
    GpuMean mean{.row = &row};
    for (const GpuResult& result : report.results) {
      if (result.product.row != &row || !result.failure.empty()) continue;
      ++mean.cases;
      mean.sustained += std::log(to_cublas(result.sustained));
      mean.cool += std::log(to_cublas(result.cool));
      mean.sustained_best += std::log(to_best(result.sustained));
      mean.cool_best += std::log(to_best(result.cool));
      mean.worst = std::max(mean.worst, to_cublas(result.sustained));
    }
    if (mean.cases == 0) continue;
    for (double* sum : {&mean.sustained, &mean.cool, &mean.sustained_best, &mean.cool_best})
      *sum = std::exp(*sum / mean.cases);
    means.push_back(mean);
  }
  return means;
}

std::string text_of(const GpuMachine& machine) {
  std::string text =
      fmt::format("{}, driver {}, CUDA {}, cuBLAS {}\n", machine.gpu, machine.driver, machine.cuda, machine.cublas);
  if (machine.nvml.empty())
    text +=
        fmt::format("power limit {:.0f} W, SM clock up to {:.0f} MHz\n", machine.power_limit_watts, machine.top_mhz);
  else
    text += fmt::format("clocks and power are unknown: {}\n", machine.nvml);
  return text;
}

std::string gpu_table_head(const GpuReport& report, int64_t hidden) {
  return fmt::format(
      "\nd = {}, F = {}, {} tokens; {} rounds sustained, {} cool; coda's time over cuBLAS' (over the fastest of "
      "cublasLt's)\n"
      "{:29} {:>26} | {:>9} {:>9} {:>6} {:>13} {:>5} {:>4} | {:>9} {:>9} {:>6} {:>13} {:>5}\n",
      hidden, gpu_ffn(hidden), report.options.tokens, report.options.rounds, report.options.cool_rounds, "program",
      "M, N, K", "sustained", "cuBLAS ms", "TF/s", "ratio (best)", "MHz", "W", "cool", "cuBLAS ms", "TF/s",
      "ratio (best)", "MHz");
}

std::string text_of(const GpuResult& result) {
  const GpuCase& product = result.product;
  std::string text = fmt::format("{:29} {:>26} | ", product.row->program, shape_of(product));
  if (!result.failure.empty()) {
    text += result.failure;
  } else {
    const auto columns = [&](const GpuRegime& regime) {
      return fmt::format("{:9.4f} {:9.4f} {:6.0f} {:>13} {:5.0f}", 1e3 * regime[0].time.median,
                         1e3 * regime[1].time.median, tflops(product, regime[1].time),
                         fmt::format("{:.3f} ({:.3f})", to_cublas(regime), to_best(regime)), median_mhz(regime));
    };
    text +=
        fmt::format("{} {:4.0f} | {}", columns(result.sustained), median_watts(result.sustained), columns(result.cool));
  }
  text += '\n';
  if (!result.errors.empty()) {
    text += "  error (of the bf16 path):";
    for (const OutputError& error : result.errors)
      text += fmt::format("  {} {:.2e} ({:.2e}){}", error.name, error.coda, error.bf16_path,
                          error.coda <= kNoise * error.bf16_path ? "" : " LARGER");
    text += '\n';
  }
  return text;
}

std::string gpu_means_table(const GpuReport& report) {
  const std::vector<GpuMean> means = gpu_means(report);
  if (means.empty()) return "";
  std::string text = fmt::format(
      "\nGeometric means over shapes and hidden sizes: time over cuBLAS' (bar), over the fastest of cublasLt's\n"
      "{:29} {:4} {:>6} | {:>19} {:>6} | {:>19} {:>6} | {:>12}\n",
      "program", "form", "shapes", "sustained", "best", "cool", "best", "worst shape");
  const auto beside_bar = [](double mean, double bar) {
    return fmt::format("{:.3f} ({:.2f}) {}", mean, bar, mean <= bar ? "met " : "over");
  };
  for (const GpuMean& mean : means)
    fmt::format_to(std::back_inserter(text), "{:29} {:4} {:6} | {:>19} {:6.3f} | {:>19} {:6.3f} | {:>12}\n",
                   mean.row->program, name(mean.row->form), mean.cases,
                   beside_bar(mean.sustained, mean.row->sustained_bar), mean.sustained_best,
                   beside_bar(mean.cool, mean.row->cool_bar), mean.cool_best,
                   fmt::format("{:.3f} {}", mean.worst, mean.worst <= kSingleShapeBar ? "met " : "over"));
  return text;
}

std::string json_of(const GpuReport& report) {
  const GpuMachine& machine = report.machine;
  const GpuOptions& options = report.options;
  Json json;
  json["machine"] = {{"gpu", machine.gpu},
                     {"driver", machine.driver},
                     {"cuda", machine.cuda},
                     {"cublas", machine.cublas},
                     {"power_limit_watts", machine.power_limit_watts},
                     {"top_mhz", machine.top_mhz}};
  if (!machine.nvml.empty()) json["machine"]["nvml"] = machine.nvml;
  json["options"] = {{"hidden", options.hidden},
                     {"tokens", options.tokens},
                     {"rounds", options.rounds},
                     {"cool_rounds", options.cool_rounds},
                     {"warm_seconds", options.warm_seconds}};
  json["results"] = Json::array();
  for (const GpuResult& result : report.results) {
    const GpuCase& product = result.product;
    Json entry = {{"row", product.row->name},
                  {"program", product.row->program},
                  {"form", name(product.row->form)},
                  {"hidden", product.hidden},
                  {"m", product.m},
                  {"n", product.n},
                  {"k", product.k},
                  {"slices", product.slices},
                  {"flops", product.flops()}};
    for (const OutputError& error : result.errors)
      entry["errors"][error.name] = {{"coda", error.coda}, {"bf16_path", error.bf16_path}};
    if (!result.failure.empty()) {
      entry["failure"] = result.failure;
    } else {
      entry["cublaslt"] = {{"suggestions", result.suggestions}, {"fastest", result.best_suggestion}};
      entry["sustained"] = json_of(product, result.sustained);
      entry["cool"] = json_of(product, result.cool);
    }
    json["results"].push_back(std::move(entry));
  }
  json["means"] = Json::array();
  for (const GpuMean& mean : gpu_means(report))
    json["means"].push_back({{"row", mean.row->name},
                             {"program", mean.row->program},
                             {"cases", mean.cases},
                             {"sustained", mean.sustained},
                             {"sustained_bar", mean.row->sustained_bar},
                             {"sustained_to_best", mean.sustained_best},
                             {"cool", mean.cool},
                             {"cool_bar", mean.row->cool_bar},
                             {"cool_to_best", mean.cool_best},
                             {"worst_sustained", mean.worst}});
  return json.dump(2) + "\n";
}

}  // namespace coda::bench
