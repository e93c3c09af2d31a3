// Files to read, whoever wrote them.
#pragma once
#include <cstdint>
#include <filesystem>

namespace coda::train {

/// A regular file, open for reading. It is read, not mapped: one that is cut short meanwhile is an error, not a SIGBUS. Every
/// fault is a FileError that names the path and the system's reason.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&&) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// In bytes, when it was opened.
  int64_t size() const { return size_; }
  /// Bytes [offset, offset + size).
  void read(int64_t offset, void* bytes, int64_t size) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace coda::train
