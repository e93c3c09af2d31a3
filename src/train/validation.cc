#include "validation.h"

#include <algorithm>

namespace coda::train {

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
    sum += model.loss(rows.batch());
    counted += rows.counted();
  }
  return sum / static_cast<double>(std::max<int64_t>(1, counted));
}

}  // namespace coda::train
