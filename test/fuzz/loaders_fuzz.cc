// Whatever a file holds, reading it ends in a value or in a FileError: no other exception, no crash, no memory that the file's
// size does not justify. The first byte says which loader the rest is for. `make fuzz` searches for what breaks this;
// fuzz_corpus_test runs what was found before, and the seeds.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "coda/error.h"
#include "train/checkpoint.h"
#include "train/data.h"
#include "train/metrics.h"
#include "train/run.h"
#include "train/safetensors.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;

/// A folder in memory if there is one, removed at exit.
class Folder {
 public:
  Folder() {
    std::string name = (fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path().string()) + "/coda-fuzz-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~Folder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  fs::path write(const char* name, std::string_view bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }
  void remove(const char* name) const { fs::remove(path_ / name); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// What stands in front of the next byte 0xff, which is not in any JSON; the rest stays in bytes.
std::string_view take_part(std::string_view& bytes) {
  const size_t end = std::min(bytes.find('\xff'), bytes.size());
  const std::string_view part = bytes.substr(0, end);
  bytes.remove_prefix(std::min(end + 1, bytes.size()));
  return part;
}

void require(bool holds) {
  if (!holds) std::abort();
}

void read_every_tensor(const SafetensorsFile& file) {
  for (const auto& [name, tensor] : file.tensors()) {
    require(SafetensorsFile::same(file, name, file, name));
    std::vector<float> value;
    try {
      file.find_float(name);
    } catch (const FileError&) {
      continue;
    }
    value.resize(static_cast<size_t>(tensor.size()));
    file.read(name, value);
  }
}

void read_safetensors(const Folder& folder, std::string_view bytes) {
  read_every_tensor(SafetensorsFile(folder.write("x", bytes)));
}

/// The same with a length in front that fits the header.
void read_safetensors_header(const Folder& folder, std::string_view bytes) {
  const std::string_view header = take_part(bytes);
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  file.append(header).append(bytes);
  read_every_tensor(SafetensorsFile(folder.write("x", file)));
}

void read_config_json(const Folder& folder, std::string_view bytes) {
  folder.write("config.json", bytes);
  read_dtype(folder.path());
  const llama::Config config = read_config(folder.path());
  llama::check(config);
  require(llama::parameter_count(config) > 0 && std::isfinite(config.rope_theta));
}

void read_run_json(const Folder& folder, std::string_view bytes) {
  folder.write("run.json", bytes);
  const RunRecord record = read_run(folder.path());
  require(to_json(options_from_json(to_json(record.options))) == to_json(record.options));
  try {
    check(record.options);
    llama::check(fresh_config(record.options));
    record.options.optimizer(record.options.steps - 1);
  } catch (const UsageError&) {  // options that a command line may hold, too
  }
}

void read_metrics(const Folder& folder, std::string_view bytes) {
  if (bytes.empty()) return;
  const int64_t step = bytes[0] & 7;
  const MetricsLog log(folder.write("metrics.jsonl", bytes.substr(1)).string(), step);
  require(std::ssize(log.steps()) <= step);
}

void read_tokens(const Folder& folder, std::string_view bytes) {
  if (bytes.size() < 2) return;
  const TokenType types[] = {TokenType::byte, TokenType::u16, TokenType::u32};
  const TokenType type = types[static_cast<unsigned char>(bytes[0]) % 3];
  const int64_t seq = 1 + (bytes[0] >> 4 & 7), vocab = type == TokenType::byte ? 256 : int64_t{1} << (bytes[1] & 31);
  const TokenFile file(folder.write("tokens", bytes.substr(2)).string(), type, std::min<int64_t>(vocab, 0x7fffffff));
  const Windows windows(file, 0, file.size(), seq);
  Rows rows;
  rows.gather(windows, std::vector<int64_t>{windows.count() - 1, 0}, 0);
  for (const int32_t token : rows.batch().tokens) require(token >= 0 && token < vocab);
}

/// config.json, model.safetensors.index.json and a weights file, which has the name of the index's shards if there is one.
void read_checkpoint(const Folder& folder, std::string_view bytes) {
  folder.write("config.json", take_part(bytes));
  const std::string_view index = take_part(bytes);
  folder.write(index.empty() ? "model.safetensors" : "a", bytes);
  if (!index.empty()) {
    folder.remove("model.safetensors");
    folder.write("model.safetensors.index.json", index);
  }
  const llama::Config config = read_config(folder.path());
  const CheckpointReader reader(folder.path());
  reader.step();
  reader.expect_parameters(config);
  reader.expect({{"model.embed_tokens.weight", {config.vocab, config.hidden}}});
  std::vector<float> value(static_cast<size_t>(config.vocab * config.hidden));
  reader.read("model.embed_tokens.weight", std::vector<int64_t>{config.vocab, config.hidden}, value);
}

}  // namespace
}  // namespace coda::train

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace coda::train;
  static const Folder folder;
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  constexpr void (*kLoaders[])(const Folder&, std::string_view) = {
      read_safetensors, read_safetensors_header, read_config_json, read_run_json, read_metrics,
      read_tokens,      read_checkpoint};
  try {
    kLoaders[data[0] % std::size(kLoaders)](folder, bytes);
  } catch (const coda::FileError& error) {
    if (std::string_view(error.what()).find('\n') != std::string_view::npos) std::abort();
  }
  return 0;
}
