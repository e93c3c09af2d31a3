// Where a value is that is not finite: asked only after a loss or a gradient's norm was found not to be.
#pragma once
#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>

#include "coda/tensor.h"

namespace coda::llama {

/// "nan", "inf" or "-inf": a NaN's sign says nothing.
inline const char* not_finite_text(double value) {
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

/// "name, row 12, column 5 (nan)" of the first one in row order, if there is one.
template <class T>
std::optional<std::string> find_not_finite(const std::string& name, Matrix<T> values) {
  for (int64_t i = 0; i < values.rows; ++i) {
    for (int64_t j = 0; j < values.cols; ++j) {
      const auto value = static_cast<float>(values.row(i)[j]);
      if (!std::isfinite(value)) {
        return fmt::format("{}, row {}, column {} ({})", name, i, j, not_finite_text(static_cast<double>(value)));
      }
    }
  }
  return std::nullopt;
}

}  // namespace coda::llama
