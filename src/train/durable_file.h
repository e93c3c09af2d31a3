// Files that are whole and on the disk before anybody is told that they exist.
#pragma once
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace coda::train {

/// "No space left on device", from errno.
std::string errno_message(int error);

/// Writes all of the bytes, or throws a FileError that names the path and the system's reason.
void write_bytes(int descriptor, const std::filesystem::path& path, const void* bytes, size_t size);

/// A file being written. Every fault is a FileError that names the path and the system's reason; a file that was not
/// finished is removed.
class DurableFile {
 public:
  /// Creates the file, or empties it.
  explicit DurableFile(std::filesystem::path path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* bytes, size_t size);
  /// Forces content and name to the disk. Nothing can be written afterwards.
  void finish();

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool regular_ = false;
};

/// from takes the place of to, in one step and for good: after a crash to is the one or the other, whole.
void commit_rename(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes a file for good, if it is there.
void remove_durably(const std::filesystem::path& path);

/// Writes a small file and forces it to the disk.
void write_file(const std::filesystem::path& path, std::string_view text);

/// The same under a partial name that is then renamed: whoever reads path finds the old text or the new one.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// The name under which a file is written before it is renamed to path.
std::filesystem::path partial_name(const std::filesystem::path& path);

}  // namespace coda::train
