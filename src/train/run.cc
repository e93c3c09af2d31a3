#include "run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <vector>

#include "coda/error.h"
#include "durable_file.h"
#include "json_file.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kRunFile = "run.json";
constexpr int64_t kLargest = 1'000'000;  // bytes of run.json, which has about 1000

ordered_json encode(const DataRecord& data) {
  return {{"path", data.path}, {"bytes", data.bytes}, {"hash", data.hash}};
}

DataRecord decode(const json& object) {
  const std::optional<int64_t> bytes = whole_number(object.at("bytes"));
  if (!bytes) throw UsageError(fmt::format("bytes is {}; it needs a whole number", shown(object.at("bytes"))));
  return {.path = object.at("path"), .bytes = *bytes, .hash = object.at("hash")};
}

/// Which files of a run or of a model the folder holds.
std::vector<std::string> run_files(const fs::path& dir) {
  std::vector<std::string> found;
  for (const char* name :
       {kRunFile, "config.json", "model.safetensors", "model.safetensors.index.json", "metrics.jsonl"}) {
    if (fs::exists(dir / name)) found.emplace_back(name);
  }
  return found;
}

}  // namespace

DataRecord DataRecord::of(const TokenFile& file) {
  return {.path = file.path(), .bytes = file.bytes(), .hash = fmt::format("{:016x}", file.hash())};
}

RunRecord read_run(const fs::path& dir) {
  const fs::path path = dir / kRunFile;
  std::error_code error;
  if (!fs::exists(path, error)) throw FileError(dir.string(), "holds no run to resume: there is no run.json");
  const json object = read_json(path, kLargest);
  try {
    RunRecord record{.options = options_from_json(object.at("options")),
                     .version = object.at("version"),
                     .data = decode(object.at("data")),
                     .valid = std::nullopt};
    if (object.contains("valid")) record.valid = decode(object.at("valid"));
    return record;
  } catch (const json::exception& fault) {
    throw FileError(path.string(), fmt::format("is damaged: {}", fault.what()));
  } catch (const UsageError& fault) {
    throw FileError(path.string(), fmt::format("is damaged: {}", fault.what()));
  }
}

void write_run(const fs::path& dir, const RunRecord& record) {
  ordered_json object = {
      {"version", record.version}, {"options", to_json(record.options)}, {"data", encode(record.data)}};
  if (record.valid) object["valid"] = encode(*record.valid);
  replace_file(dir / kRunFile, object.dump(2) + "\n");
}

void refuse_changed_data(const DataRecord& started, const DataRecord& now) {
  const std::string where = started.path == now.path ? "" : fmt::format(" (the run was started on {})", started.path);
  if (started.bytes != now.bytes) {
    throw FileError(now.path, fmt::format("the data changed{}: {} bytes where the run was started on {}", where,
                                          now.bytes, started.bytes));
  }
  if (started.hash != now.hash) {
    throw FileError(now.path,
                    fmt::format("the data changed{}: as long as it was, but of other contents (hash {}, not {})", where,
                                now.hash, started.hash));
  }
}

void refuse_to_overwrite(const fs::path& dir) {
  if (fs::exists(dir) && !fs::is_directory(dir)) throw UsageError(fmt::format("--out {}: not a folder", dir.string()));
  const std::vector<std::string> found = run_files(dir);
  if (found.empty()) return;
  const bool resumable = found.front() == kRunFile;
  throw UsageError(fmt::format("--out {}: there is {} already ({}); {}give another --out", dir.string(),
                               resumable ? "a run" : "a model", fmt::join(found, ", "),
                               resumable ? fmt::format("go on with it by --resume {}, or ", dir.string()) : ""));
}

fs::path free_folder(const std::string& data) {
  const fs::path first = fs::path("runs") / fs::path(data).stem();
  fs::path free = first;
  for (int n = 2; fs::exists(free); ++n) free = fmt::format("{}-{}", first.string(), n);
  return free;
}

FolderLock::FolderLock(const fs::path& dir) {
  folder_ = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0) throw FileError(dir.string(), "cannot be opened: " + errno_message(errno));
  if (flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;  // some file systems have no locks
  close(folder_);
  throw UsageError(fmt::format("{}: another process is training there", dir.string()));
}

FolderLock::~FolderLock() {
  close(folder_);
}

}  // namespace coda::train
