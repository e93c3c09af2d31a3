// Tables and numbers for a terminal.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace coda::explain {

/// Columns as wide as their widest cell, two spaces between them. The first line is the header; in alignment a letter per
/// column says l(eft) or r(ight). A line of one cell runs across. Combining marks take no column.
std::string table(const std::vector<std::vector<std::string>>& lines, const std::string& alignment);

/// Three digits and a decimal unit: "134 MB", "0 B".
std::string bytes_text(int64_t bytes);
std::string flops_text(int64_t flops);                       // "550 GFLOP"
std::string time_text(double seconds);                       // "556 µs"
std::string rate_text(double per_second, const char* unit);  // "989 TFLOP/s"

}  // namespace coda::explain
