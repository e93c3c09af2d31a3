// Training data: a file of tokens, cut into windows, gathered into batches.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "input_file.h"
#include "llama/model.h"

namespace coda::train {

/// How a file spells its tokens: text, whose bytes are the tokens, or headerless little-endian ids.
enum class TokenType { byte, u16, u32 };

/// A file of tokens, read where it is needed.
class TokenFile {
 public:
  /// Reads the file once, to hash it and to find an id that is not below vocab. Throws FileError that names its index and
  /// value, or the size that is not a multiple of an id's width.
  TokenFile(const std::string& path, TokenType type, int64_t vocab);

  const std::string& path() const { return path_; }
  int64_t size() const { return bytes() / width_; }  // in tokens
  int64_t bytes() const { return file_.size(); }
  /// 64 bits of the contents. They tell a changed file from the same file, and are no protection against a forger.
  uint64_t hash() const { return hash_; }

  /// Tokens [first, first + out.size()). Throws FileError if the file was cut short meanwhile.
  void copy(int64_t first, std::span<int32_t> out) const;

 private:
  InputFile file_;
  int64_t width_;  // of an id, in bytes
  std::string path_;
  uint64_t hash_ = 0;
};

/// A part of a file as windows: window i reads tokens [i * seq, i * seq + seq) of the part, and its targets are the same
/// shifted by one. The tokens past the last whole window are not used.
class Windows {
 public:
  /// Throws FileError if the part does not hold one window and the token that follows it.
  Windows(const TokenFile& file, int64_t first, int64_t size, int64_t seq);

  int64_t count() const { return count_; }
  int64_t seq() const { return seq_; }
  /// The tokens of window i and the one that follows: out is of seq + 1.
  void copy(int64_t i, std::span<int32_t> out) const { file_->copy(first_ + i * seq_, out); }

  /// Whether size tokens hold one window.
  static bool fit(int64_t size, int64_t seq) { return size > seq; }

 private:
  const TokenFile* file_;
  int64_t first_;
  int64_t seq_;
  int64_t count_;
};

/// The last fraction of a file, held out for validation, begins at this token.
int64_t holdout_start(int64_t size, double fraction);

/// Rows of windows as the model takes them, with their memory.
class Rows {
 public:
  /// Every row begins a document. So does the token after a separator, which ends its own; the separator's target is then
  /// another document's and does not count.
  void gather(const Windows& windows, std::span<const int64_t> indices, std::optional<int32_t> separator);

  llama::Batch batch() const { return {tokens_, targets_, document_starts_}; }
  /// Targets that count.
  int64_t counted() const { return counted_; }
  int64_t tokens() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::vector<int32_t> tokens_;
  std::vector<int32_t> targets_;
  std::vector<int64_t> document_starts_;
  std::vector<int32_t> window_;  // [seq + 1]
  int64_t counted_ = 0;
};

}  // namespace coda::train
