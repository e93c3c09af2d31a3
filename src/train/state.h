// What a run needs to go on bit for bit, in its folder: the model in Hugging Face's layout, and beside it
// optimizer-<step>.safetensors with the masters and moments.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>

#include "llama/model.h"

namespace coda::train {

/// The step of the folder's checkpoint; nothing where a run has not saved yet.
std::optional<int64_t> saved_step(const std::filesystem::path& dir);

struct Saving {
  uint64_t seed = 0;
  int64_t keep = 1;  // complete checkpoints
};

/// config.json of a folder, held against the weights beside it: what it says is a model of no more parameters than they have.
/// Throws FileError as read_config() and CheckpointReader do.
llama::Config read_model_config(const std::filesystem::path& dir);

/// Saves the model after model.updates() steps. The optimizer's file is on the disk before the model's is renamed, which
/// commits both; older files go after. A crash at any moment leaves the old checkpoint or the new one, whole. With keep > 1
/// the older checkpoints stay as folders of their own, step-<N>, that eval, sample, --init and --resume take.
void save_state(const std::filesystem::path& dir, llama::Model& model, const Saving& saving);

/// Makes model what it was when it was saved, masters, moments and number of updates.
void load_state(const std::filesystem::path& dir, llama::Model& model);

/// Sets the weights from somebody's checkpoint. Throws FileError if it is of another shape.
void load_weights(const std::filesystem::path& dir, llama::Model& model);

}  // namespace coda::train
