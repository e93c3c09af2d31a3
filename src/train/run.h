// The folder of a run: run.json, what it was started with, and who may write there.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "options.h"

namespace coda::train {

/// Which data a run was started on.
struct DataRecord {
  std::string path;
  int64_t bytes = 0;
  std::string hash;  // 16 hexadecimal digits

  static DataRecord of(const TokenFile& file);
};

struct RunRecord {
  Options options;
  std::string version;
  DataRecord data;
  std::optional<DataRecord> valid;
};

/// Throws FileError for a folder without a run.json, or with a damaged one.
RunRecord read_run(const std::filesystem::path& dir);
/// Replaces run.json in one step.
void write_run(const std::filesystem::path& dir, const RunRecord& record);

/// Throws FileError saying what changed, if now is not the data that the run was started on. Where it lies may differ.
void refuse_changed_data(const DataRecord& started, const DataRecord& now);

/// Throws UsageError naming what is there and how to resume, if the folder holds a run or a model.
void refuse_to_overwrite(const std::filesystem::path& dir);

/// runs/<name of the data>, or with -2, -3, … the first that is not there yet.
std::filesystem::path free_folder(const std::string& data);

/// One writer a folder: held until destruction, and released by the system if the process dies.
class FolderLock {
 public:
  /// Throws UsageError if another process trains there.
  explicit FolderLock(const std::filesystem::path& dir);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int folder_ = -1;
};

}  // namespace coda::train
