#include "explain/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace coda::explain {
namespace {

/// Code points of UTF-8 that take a column.
size_t columns(const std::string& text) {
  size_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c & 0xC0u) == 0x80u) continue;      // inside a code point
    if (c == 0xCCu || c == 0xCDu) continue;  // U+0300…U+037F begins with the combining marks
    ++count;
  }
  return count;
}

/// value in the largest of the units, each 1000 times the one before, in which it is 1 or more.
std::string scaled(double value, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  while (unit + 1 < units.end() && std::abs(value) >= 999.5) {
    value /= 1000;
    ++unit;
  }
  const int decimals = value >= 99.95 || value == std::floor(value) ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, decimals, *unit);
}

}  // namespace

std::string table(const std::vector<std::vector<std::string>>& lines, const std::string& alignment) {
  std::vector<size_t> widths(alignment.size(), 0);
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size() && line.size() > 1; ++i) widths[i] = std::max(widths[i], columns(line[i]));
  std::string out;
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string gap(line.size() > 1 ? widths[i] - columns(line[i]) : 0, ' ');
      if (i > 0) text += "  ";
      text += alignment[i] == 'r' ? gap + line[i] : line[i] + gap;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  return out;
}

std::string bytes_text(int64_t bytes) {
  return scaled(static_cast<double>(bytes), {"B", "kB", "MB", "GB", "TB", "PB"});
}

std::string flops_text(int64_t flops) {
  return scaled(static_cast<double>(flops), {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"});
}

std::string time_text(double seconds) {
  return scaled(seconds * 1e9, {"ns", "µs", "ms", "s"});
}

std::string rate_text(double per_second, const char* unit) {
  const std::string text = scaled(per_second, {"", "k", "M", "G", "T", "P"});
  return text + unit + "/s";
}

}  // namespace coda::explain
