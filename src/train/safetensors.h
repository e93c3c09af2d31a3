// Files of named tensors in the safetensors format: a length, a JSON header, then the tensors' bytes without gaps.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "input_file.h"

namespace coda::train {

/// A tensor as a file's header describes it.
struct StoredTensor {
  std::string dtype;           // "F32", "BF16", "F16", …
  std::vector<int64_t> shape;  // [] is a single value
  int64_t begin = 0;           // bytes from the first tensor's
  int64_t end = 0;
  int64_t size() const;  // number of elements
};

/// An open file. The constructor reads and checks the whole header, so that whatever the header says holds afterwards:
/// tensors lie inside the file, next to each other, as many bytes as dtype and shape ask for. Every fault, here and in
/// reading, is a FileError.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Throws if the tensor is missing or has another dtype than F32, BF16, F16.
  const StoredTensor& find_float(const std::string& name) const;
  /// value.size() is the tensor's size. F32, BF16 and F16 become float exactly.
  void read(const std::string& name, std::span<float> value) const;

  /// Whether two tensors have the same dtype, shape and bytes.
  static bool same(const SafetensorsFile& a, const std::string& name_a, const SafetensorsFile& b,
                   const std::string& name_b);

 private:
  int64_t tensor_offset(const StoredTensor& tensor) const { return data_offset_ + tensor.begin; }

  InputFile file_;
  int64_t data_offset_ = 0;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

enum class FloatFormat { f32, bf16 };

struct TensorToWrite {
  std::string name;
  std::vector<int64_t> shape;
  FloatFormat format = FloatFormat::f32;
  std::function<void(std::span<float>)> fill;  // called once, when the tensor's turn comes; every element is to be set
  int64_t bytes() const;
};

/// Writes path and forces it to the disk; one tensor at a time is in memory. bf16 is rounded to nearest, ties to even.
/// After a fault there is no file at path. To replace a file that is in use, write partial_name() and commit_rename() (durable_file.h).
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata);

/// "[256, 688]"
std::string shape_text(std::span<const int64_t> shape);

}  // namespace coda::train
