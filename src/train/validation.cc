#include "validation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "llama/not_finite.h"

namespace coda::train {

std::string not_finite_message(const char* what, double value, const std::optional<std::string>& where) {
  return fmt::format("the {} is {}; {}", what, llama::not_finite_text(value),
                     where ? "the first value that is not finite is in " + *where
                           : "every value that it was made from is finite, but too large");
}

Evaluation Evaluation::spread(int64_t windows, int64_t most, int64_t batch, std::optional<int32_t> document_separator) {
  const int64_t rows = std::min(windows, most);
  return {.rows = rows,
          .window = [=](int64_t row) { return row * windows / rows; },
          .batch = batch,
          .document_separator = document_separator,
          .stop = {}};
}

std::optional<double> mean_loss(llama::Model& model, const Windows& windows, const Evaluation& evaluation) {
  Rows rows;
  std::vector<int64_t> indices;
  double sum = 0;
  int64_t counted = 0;
  for (int64_t first = 0; first < evaluation.rows; first += evaluation.batch) {
    if (evaluation.stop && evaluation.stop()) return std::nullopt;
    indices.clear();
    for (int64_t row = first; row < std::min(first + evaluation.batch, evaluation.rows); ++row) {
      indices.push_back(evaluation.window(row));
    }
    rows.gather(windows, indices, evaluation.document_separator);
    const double loss = model.loss(rows.batch());
    if (!std::isfinite(loss)) throw NotFinite(not_finite_message("loss", loss, model.find_not_finite(rows.batch())));
    sum += loss;
    counted += rows.counted();
  }
  if (counted == 0) return std::nullopt;
  return sum / static_cast<double>(counted);
}

}  // namespace coda::train
