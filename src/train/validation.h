// The loss of a model on windows, without training.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "coda/error.h"
#include "data.h"
#include "llama/model.h"

namespace coda::train {

/// Which windows: row i of `rows` is window(i). The last batch may be smaller.
struct Evaluation {
  int64_t rows = 0;
  std::function<int64_t(int64_t row)> window;
  int64_t batch = 8;
  std::optional<int32_t> document_separator;
  std::function<bool()> stop;  // asked before each batch; may be empty

  /// At most `most` of the windows, spread evenly over them.
  static Evaluation spread(int64_t windows, int64_t most, int64_t batch, std::optional<int32_t> document_separator);
};

/// A number that has to be finite and is not.
class NotFinite : public Error {
 public:
  using Error::Error;
};

/// Mean cross-entropy over all targets that count; nothing if it was stopped, or if no target counts. Throws NotFinite saying
/// where the first value is that is not finite, if the loss is not.
std::optional<double> mean_loss(llama::Model& model, const Windows& windows, const Evaluation& evaluation);

/// "the loss is nan; the first value that is not finite is in layer 2, gate_up, row 12, column 5 (inf)"
std::string not_finite_message(const char* what, double value, const std::optional<std::string>& where);

}  // namespace coda::train
