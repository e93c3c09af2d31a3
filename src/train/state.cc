#include "state.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "checkpoint.h"
#include "coda/error.h"
#include "durable_file.h"
#include "json_file.h"
#include "safetensors.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;

std::string optimizer_name(int64_t step) {
  return fmt::format("optimizer-{}.safetensors", step);
}
std::string snapshot_name(int64_t step) {
  return fmt::format("step-{}", step);
}

/// The step in a name like optimizer-120.safetensors; nothing for any other name.
std::optional<int64_t> step_in(const std::string& name, const std::string& prefix, const std::string& suffix) {
  if (name.size() <= prefix.size() + suffix.size() || !name.starts_with(prefix) || !name.ends_with(suffix)) {
    return std::nullopt;
  }
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size() - suffix.size();
  int64_t step = 0;
  const auto [stop, error] = std::from_chars(begin, end, step);
  if (error != std::errc{} || stop != end || step < 0) return std::nullopt;
  return step;
}

void write_optimizer(const fs::path& dir, llama::Model& model, uint64_t seed) {
  std::vector<TensorToWrite> tensors;
  for (const llama::StateTensor& state : model.optimizer_state()) {
    tensors.push_back({.name = state.name,
                       .shape = {state.size},
                       .format = FloatFormat::f32,
                       .fill = [&model, state](std::span<float> out) { model.get_state(state, out); }});
  }
  const fs::path path = dir / optimizer_name(model.updates());
  write_safetensors(partial_name(path), tensors,
                    {{"step", std::to_string(model.updates())}, {"seed", std::to_string(seed)}});
  commit_rename(partial_name(path), path);
}

/// A second name for the same bytes where the file system has hard links: none of these files is ever changed in place.
void link_or_copy(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::create_hard_link(from, to, error);
  if (error) fs::copy_file(from, to, fs::copy_options::overwrite_existing);
}

/// Gives the folder's checkpoint, of this step, a folder of its own, before the next one takes its names.
void keep_snapshot(const fs::path& dir, int64_t step) {
  const fs::path snapshot = dir / snapshot_name(step);
  if (fs::exists(snapshot)) return;
  const fs::path partial = partial_name(snapshot);
  fs::remove_all(partial);
  fs::create_directory(partial);
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    const bool weights = name.starts_with("model") && !name.ends_with(".partial");
    if (weights || name == "config.json" || name == "run.json" || name == optimizer_name(step)) {
      link_or_copy(entry.path(), partial / name);
    }
  }
  commit_rename(partial, snapshot);
}

/// Removes what the checkpoint of this step has replaced.
void remove_older(const fs::path& dir, int64_t step, int64_t keep) {
  std::vector<fs::path> stale;
  std::vector<std::pair<int64_t, fs::path>> snapshots;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    const auto optimizer_step = step_in(name, "optimizer-", ".safetensors");
    const bool torn = step_in(name, "optimizer-", ".safetensors.partial") || step_in(name, "step-", ".partial");
    if (torn || (optimizer_step && *optimizer_step != step)) stale.push_back(entry.path());
    const auto snapshot_step = step_in(name, "step-", "");
    // One that was resumed has become a run of its own.
    if (snapshot_step && fs::exists(entry.path() / "run.json") && !fs::exists(entry.path() / "metrics.jsonl")) {
      snapshots.emplace_back(*snapshot_step, entry.path());
    }
  }
  std::ranges::sort(snapshots);
  const size_t kept = static_cast<size_t>(keep - 1);
  for (size_t i = 0; i + kept < snapshots.size(); ++i) stale.push_back(snapshots[i].second);
  for (const fs::path& path : stale) fs::remove_all(path);
  remove_stale_weights(dir);
}

}  // namespace

llama::Config read_model_config(const fs::path& dir) {
  const llama::Config config = read_config(dir);
  CheckpointReader(dir).expect_parameters(config);
  return config;
}

std::optional<int64_t> saved_step(const fs::path& dir) {
  std::error_code error;
  if (!fs::exists(dir / "model.safetensors", error) && !fs::exists(dir / "model.safetensors.index.json", error)) {
    return std::nullopt;
  }
  const auto step = CheckpointReader(dir).step();
  if (!step)
    throw FileError(dir.string(), "the model there does not say after which step it was saved: it is not coda's");
  return step;
}

void save_state(const fs::path& dir, llama::Model& model, const Saving& saving) try {
  const int64_t step = model.updates();
  const std::optional<int64_t> before = saved_step(dir);
  write_optimizer(dir, model, saving.seed);
  if (saving.keep > 1 && before && *before != step) keep_snapshot(dir, *before);
  write_checkpoint(
      dir, model.config(), model.dtype(), model.tensors(),
      [&](const std::string& name, std::span<float> value) { model.get_tensor(name, value); }, step);
  remove_older(dir, step, saving.keep);
} catch (const fs::filesystem_error& fault) {
  throw FileError((fault.path1().empty() ? dir : fault.path1()).string(),
                  "cannot be changed: " + fault.code().message());
}

void load_state(const fs::path& dir, llama::Model& model) {
  const int64_t step = saved_step(dir).value();
  const fs::path path = dir / optimizer_name(step);
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw FileError(
        path.string(),
        fmt::format("is missing, so the run cannot go on as it was; --init {} starts a new run from its weights",
                    dir.string()));
  }
  const SafetensorsFile file(path);
  if (const auto said = file.metadata().find("step");
      said == file.metadata().end() || said->second != fmt::format("{}", step)) {
    throw FileError(path.string(), fmt::format("does not say that it is of step {}", step));
  }
  std::vector<float> value;
  for (const llama::StateTensor& state : model.optimizer_state()) {
    if (file.find_float(state.name).size() != state.size) {
      throw FileError(path.string(), fmt::format("{} has {} values where the model has {}", quote_name(state.name),
                                                 file.find_float(state.name).size(), state.size));
    }
    value.resize(static_cast<size_t>(state.size));
    file.read(state.name, value);
    model.set_state(state, value);
  }
  model.set_updates(step);
  model.weights_changed();
}

void load_weights(const fs::path& dir, llama::Model& model) {
  const CheckpointReader reader(dir);
  const std::vector<llama::TensorInfo> tensors = model.tensors();
  reader.expect(tensors);
  std::vector<float> value;
  for (const llama::TensorInfo& tensor : tensors) {
    value.resize(static_cast<size_t>(tensor.size()));
    reader.read(tensor.name, tensor.shape, value);
    model.set_tensor(tensor.name, value);
  }
  model.weights_changed();
}

}  // namespace coda::train
