// Checkpoints in Hugging Face's layout, both ways: config.json, and the weights in model.safetensors or in shards with
// model.safetensors.index.json. Where both are there, model.safetensors is the checkpoint, as it is for transformers.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llama/config.h"
#include "llama/model.h"
#include "safetensors.h"

namespace coda::train {

/// config.json as coda's numbers, with LlamaConfig's defaults for missing keys. Throws FileError naming the key where
/// the file is damaged, contradicts itself or asks for mathematics that coda does not have.
llama::Config read_config(const std::filesystem::path& dir);

/// torch_dtype or dtype of config.json, "float32" where there is neither. What the tensors are is up to the weights.
std::string read_dtype(const std::filesystem::path& dir);

/// Writes config.json in the spelling that transformers 4 and 5 both read; the old one stays whole until it is replaced.
void write_config(const std::filesystem::path& dir, const llama::Config& config, llama::Dtype dtype);

/// The weights of a folder, one file or shards.
class CheckpointReader {
 public:
  /// Opens and checks every file; no tensor is read yet.
  explicit CheckpointReader(const std::filesystem::path& dir);

  /// Throws FileError if config asks for more parameters than the files hold: to be asked before a model is made, whose memory
  /// is to be no larger than what is there to fill it.
  void expect_parameters(const llama::Config& config) const;

  /// Throws FileError unless the checkpoint has just these tensors, in these shapes, of dtypes that can be read. Buffers
  /// *.rotary_emb.inv_freq do not count, nor does an lm_head.weight that is not asked for and equals the embedding.
  void expect(const std::vector<llama::TensorInfo>& tensors) const;

  /// value.size() is the product of shape.
  void read(const std::string& name, std::span<const int64_t> shape, std::span<float> value) const;

  /// Of model.safetensors, or of the index; values that are not strings as JSON.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// The training step that coda wrote the checkpoint after; nothing for somebody else's.
  std::optional<int64_t> step() const;

 private:
  void open_shards(const std::filesystem::path& index);
  const SafetensorsFile& file_of(const std::string& name) const;
  void check_shape(const std::string& name, std::span<const int64_t> shape) const;

  std::filesystem::path source_;  // model.safetensors or the index
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> file_of_tensor_;
  std::map<std::string, std::string> metadata_;
};

/// What transformers splits at, too.
inline constexpr int64_t kDefaultShardBytes = 5'000'000'000;

/// Replaces the folder's checkpoint in one step: until the very last rename or removal a reader (coda's, or transformers)
/// finds the old one whole, afterwards the new one. A fault throws and leaves the old one. get fills in a tensor in Hugging
/// Face's layout. Config.json is written first; a folder is meant to keep one model. Creates the folder.
///   one file:  model.safetensors, renamed
///   shards:    model-<step>-0000i-of-0000n.safetensors, then their index, renamed, then model.safetensors, removed
/// Shards of older checkpoints stay until remove_stale_weights().
void write_checkpoint(const std::filesystem::path& dir, const llama::Config& config, llama::Dtype dtype,
                      const std::vector<llama::TensorInfo>& tensors,
                      const std::function<void(const std::string& name, std::span<float> value)>& get, int64_t step,
                      int64_t max_shard_bytes = kDefaultShardBytes);

/// Removes what coda wrote into the folder and the checkpoint in force does not use: shards of other steps, an index beside
/// model.safetensors, partial files of a save that was cut off. Shards with names of somebody else's stay.
void remove_stale_weights(const std::filesystem::path& dir);

}  // namespace coda::train
