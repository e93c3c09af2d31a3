#include "metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "coda/error.h"

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
    StepMetrics metrics{.step = line.at("step"),
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
  {
    std::ifstream in(path, std::ios::binary);
    std::string line;
    // A line that getline ended at the end of the file has no newline: it was torn.
    while (std::getline(in, line) && !in.eof()) {
      const auto metrics = from_line(line);
      if (!metrics || metrics->step >= step) break;
      if (!steps_.empty() && metrics->step <= steps_.back().step) break;
      steps_.push_back(*metrics);
      kept += static_cast<int64_t>(line.size()) + 1;
    }
  }
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) throw FileError(path, std::strerror(errno));
  if (ftruncate(file_, kept) != 0) {
    const int trouble = errno;
    close(file_);
    throw FileError(path, std::strerror(trouble));
  }
}

MetricsLog::~MetricsLog() {
  close(file_);
}

void MetricsLog::append(const StepMetrics& metrics) {
  const std::string line = to_line(metrics);
  // One write a line: whoever follows the file sees whole lines.
  for (size_t done = 0; done < line.size();) {
    const ssize_t wrote = write(file_, line.data() + done, line.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) throw FileError(path_, std::strerror(errno));
    done += static_cast<size_t>(wrote);
  }
  steps_.push_back(metrics);
}

void MetricsLog::sync() {
  if (fsync(file_) != 0) throw FileError(path_, std::strerror(errno));
}

}  // namespace coda::train
