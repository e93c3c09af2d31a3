#include "metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "coda/error.h"
#include "durable_file.h"
#include "input_file.h"
#include "json_file.h"

namespace coda::train {
namespace {

std::string to_line(const StepMetrics& metrics) {
  nlohmann::ordered_json line = {{"step", metrics.step},
                                 {"loss", metrics.loss},
                                 {"grad_norm", metrics.grad_norm},
                                 {"tokens_per_s", metrics.tokens_per_s},
                                 {"lr", metrics.lr}};
  if (metrics.valid_loss) line["valid_loss"] = *metrics.valid_loss;
  return line.dump() + "\n";
}

std::optional<StepMetrics> from_line(const std::string& text) {
  const auto line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return std::nullopt;
  try {
    const std::optional<int64_t> step = whole_number(line.at("step"));
    if (!step) return std::nullopt;
    StepMetrics metrics{.step = *step,
                        .loss = line.at("loss"),
                        .grad_norm = line.at("grad_norm"),
                        .tokens_per_s = line.at("tokens_per_s"),
                        .lr = line.at("lr"),
                        .valid_loss = std::nullopt};
    if (line.contains("valid_loss")) metrics.valid_loss = line.at("valid_loss").get<double>();
    return metrics;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

MetricsLog::MetricsLog(const std::string& path, int64_t step) : path_(path) {
  int64_t kept = 0;
  std::error_code error;
  if (std::filesystem::exists(path, error)) kept = read_lines(step);
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file_ < 0) throw FileError(path, "cannot be opened: " + errno_message(errno));
  if (ftruncate(file_, kept) != 0) {
    const int trouble = errno;
    close(file_);
    throw FileError(path, "cannot be cut: " + errno_message(trouble));
  }
}

int64_t MetricsLog::read_lines(int64_t step) {
  const InputFile file(path_);  // refuses what is not a regular file
  std::ifstream in(path_, std::ios::binary);
  std::array<char, 4096> line{};  // far longer than any
  int64_t kept = 0;
  // A line that getline ended at the end of the file has no newline: it was torn.
  while (in.getline(line.data(), line.size()) && !in.eof()) {
    const std::string text(line.data(), static_cast<size_t>(in.gcount() - 1));
    const std::optional<StepMetrics> metrics = from_line(text);
    if (!metrics || metrics->step < 0 || metrics->step >= step) break;
    if (!steps_.empty() && metrics->step != steps_.back().step + 1) break;
    steps_.push_back(*metrics);
    kept += in.gcount();
  }
  // Nothing at all is a history that somebody has put away.
  if (file.size() > 0 && step > 0 && (steps_.empty() || steps_.back().step != step - 1)) {
    throw FileError(path_, fmt::format("is damaged: line {} is not that of step {}, and the checkpoint is of step {}; "
                                       "move the file away to go on without this history",
                                       steps_.size() + 1, steps_.empty() ? 0 : steps_.back().step + 1, step));
  }
  return kept;
}

MetricsLog::~MetricsLog() {
  close(file_);
}

void MetricsLog::append(const StepMetrics& metrics) {
  const std::string line = to_line(metrics);
  // One write a line: whoever follows the file sees whole lines.
  write_bytes(file_, path_, line.data(), line.size());
  steps_.push_back(metrics);
}

void MetricsLog::sync() {
  if (fsync(file_) != 0) throw FileError(path_, "cannot be forced to the disk: " + errno_message(errno));
}

}  // namespace coda::train
