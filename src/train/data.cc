#include "data.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "coda/error.h"

namespace coda::train {
namespace {

constexpr int32_t kIgnored = -100;  // a target that the loss leaves out

int64_t width_of(TokenType type) {
  switch (type) {
    case TokenType::byte:
      return 1;
    case TokenType::u16:
      return 2;
    case TokenType::u32:
      return 4;
  }
  return 1;
}

/// Little-endian whatever the machine, so that a token file means the same everywhere.
int64_t id_at(const unsigned char* p, int64_t width) {
  int64_t id = 0;
  for (int64_t i = 0; i < width; ++i) id |= int64_t{p[i]} << (8 * i);
  return id;
}

/// Eight bytes a step: a byte at a time a large file would cost seconds.
uint64_t hash_of(const unsigned char* data, int64_t bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
  uint64_t hash = static_cast<uint64_t>(bytes) * kOdd;
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = static_cast<uint64_t>(id_at(data + i, std::min<int64_t>(8, bytes - i)));
    hash = std::rotl((hash ^ word) * kOdd, 29);
  }
  // The last words have not met the upper bits yet.
  hash = (hash ^ (hash >> 32)) * kOdd;
  return hash ^ (hash >> 29);
}

}  // namespace

TokenFile::TokenFile(const std::string& path, TokenType type, int64_t vocab) : path_(path), type_(type) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw FileError(path, std::strerror(errno));
  struct stat status {};
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file);
    throw FileError(path, "not a regular file, so it cannot be mapped as training data");
  }
  bytes_ = status.st_size;
  if (bytes_ > 0) {
    void* map = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, file, 0);
    const int trouble = errno;
    if (map == MAP_FAILED) {
      close(file);
      throw FileError(path, std::strerror(trouble));
    }
    map_ = static_cast<const unsigned char*>(map);
  }
  close(file);

  // From here on the destructor would not run: unmap before each throw.
  const auto refuse = [&](const std::string& trouble) {
    if (map_ != nullptr) munmap(const_cast<unsigned char*>(map_), static_cast<size_t>(bytes_));
    throw FileError(path, trouble);
  };
  const int64_t width = width_of(type);
  if (bytes_ % width != 0) refuse(fmt::format("{} bytes are not a multiple of {}, the width of an id", bytes_, width));
  size_ = bytes_ / width;
  if (vocab < (int64_t{1} << (8 * width))) {
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t id = id_at(map_ + i * width, width);
      if (id >= vocab) refuse(fmt::format("token {} is {}, but the vocabulary is {}", i, id, vocab));
    }
  }
  hash_ = hash_of(map_, bytes_);
}

TokenFile::~TokenFile() {
  if (map_ != nullptr) munmap(const_cast<unsigned char*>(map_), static_cast<size_t>(bytes_));
}

void TokenFile::copy(int64_t first, std::span<int32_t> out) const {
  const int64_t width = width_of(type_);
  const unsigned char* p = map_ + first * width;
  for (int32_t& token : out) {
    token = static_cast<int32_t>(id_at(p, width));
    p += width;
  }
}

Windows::Windows(const TokenFile& file, int64_t first, int64_t size, int64_t seq)
    : file_(&file), first_(first), seq_(seq), count_(fit(size, seq) ? (size - 1) / seq : 0) {
  if (count_ > 0) return;
  const std::string part = size == file.size() ? "" : fmt::format(" in this part (of {} in all)", file.size());
  throw FileError(file.path(), fmt::format("{} tokens{} are less than one window of --seq {} and the token after it",
                                           size, part, seq));
}

int64_t holdout_start(int64_t size, double fraction) {
  return size - std::llround(static_cast<double>(size) * fraction);
}

void Rows::gather(const Windows& windows, std::span<const int64_t> indices, std::optional<int32_t> separator) {
  const int64_t seq = windows.seq();
  const int64_t total = static_cast<int64_t>(indices.size()) * seq;
  tokens_.resize(static_cast<size_t>(total));
  targets_.resize(static_cast<size_t>(total));
  window_.resize(static_cast<size_t>(seq + 1));
  document_starts_.clear();
  counted_ = total;

  int64_t row = 0;
  for (const int64_t index : indices) {
    windows.copy(index, window_);
    std::copy(window_.begin(), window_.end() - 1, tokens_.begin() + row);
    std::copy(window_.begin() + 1, window_.end(), targets_.begin() + row);
    document_starts_.push_back(row);
    if (separator) {
      for (int64_t i = 0; i < seq; ++i) {
        if (window_[static_cast<size_t>(i)] != *separator) continue;
        targets_[static_cast<size_t>(row + i)] = kIgnored;
        --counted_;
        if (i + 1 < seq) document_starts_.push_back(row + i + 1);
      }
    }
    row += seq;
  }
  document_starts_.push_back(total);
}

}  // namespace coda::train
