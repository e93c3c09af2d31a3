// The training loop: data, forward and backward, update, and what is told and saved on the way.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coda/cpu.h"
#include "data.h"
#include "metrics.h"
#include "options.h"
#include "order.h"
#include "progress.h"
#include "run.h"
#include "validation.h"

namespace coda::train {

/// How a call of Trainer::run() ended.
struct Outcome {
  int64_t step = 0;                  // steps done since the run began
  int signal = 0;                    // what stopped it before its end, or 0
  std::optional<double> valid_loss;  // of the end of the run
};

/// One run in one folder.
class Trainer {
 public:
  enum class Start { fresh, resume };

  /// Opens the data and makes the model; nothing is written before all of it is known to work. fresh: the folder must not
  /// hold a run. resume: options are resumed_options(); the data must be what it was, and the metrics after the last
  /// checkpoint are cut.
  Trainer(Cpu& cpu, const std::filesystem::path& dir, const Options& options, Start start);
  ~Trainer();

  /// A few lines for a person: data, model, run.
  std::vector<std::string> description() const;

  /// Trains to the last step and saves. stop is asked after every step; what it returns, if not 0, ends the run there, saved.
  /// Throws Error naming the step if the loss, the gradient's norm or what is to be saved is not finite, and where the first
  /// value is that is not; the last checkpoint then stays.
  Outcome run(Progress& progress, const std::function<int()>& stop);

  llama::Model& model() { return *model_; }
  int64_t step() const { return step_; }
  const std::filesystem::path& dir() const { return dir_; }
  std::filesystem::path picture() const { return dir_ / "loss.svg"; }
  /// Windows of the last validation, and of the validation's part.
  int64_t validated_windows() const;
  int64_t valid_windows() const { return valid_ ? valid_->count() : 0; }

 private:
  /// Gathers the step's rows, trains on them; leaves tokens_per_s and valid_loss open. Where no target counts, the loss and the
  /// gradient are 0, and progress says so.
  StepMetrics train_step(Progress& progress);
  /// Nothing if it was stopped, or if no target counts.
  std::optional<double> validate(bool last, const std::function<int()>& stop);
  /// Throws the Error that ends a run whose numbers are not finite.
  [[noreturn]] void refuse(const std::string& trouble) const;
  void save();
  std::string title() const;

  Options options_;
  std::filesystem::path dir_;
  std::unique_ptr<TokenFile> data_;
  std::unique_ptr<TokenFile> valid_data_;
  std::optional<Windows> windows_;
  std::optional<Windows> valid_;
  std::optional<Order> order_;
  std::unique_ptr<llama::Model> model_;
  std::unique_ptr<FolderLock> lock_;
  std::unique_ptr<MetricsLog> metrics_;
  std::vector<Rows> rows_;  // [accumulate]
  int threads_ = 0;
  int64_t step_ = 0;
  std::optional<int64_t> saved_;
};

}  // namespace coda::train
