#include "data.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

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
class Hash {
 public:
  explicit Hash(int64_t bytes) : hash_(static_cast<uint64_t>(bytes) * kOdd) {}
  /// The next bytes; every part but the last is a multiple of eight long.
  void add(const unsigned char* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 8) {
      const uint64_t word = static_cast<uint64_t>(id_at(data + i, std::min<int64_t>(8, bytes - i)));
      hash_ = std::rotl((hash_ ^ word) * kOdd, 29);
    }
  }
  uint64_t value() const {
    // The last words have not met the upper bits yet.
    const uint64_t mixed = (hash_ ^ (hash_ >> 32)) * kOdd;
    return mixed ^ (mixed >> 29);
  }

 private:
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
  uint64_t hash_;
};

}  // namespace

TokenFile::TokenFile(const std::string& path, TokenType type, int64_t vocab)
    : file_(path), width_(width_of(type)), path_(path) {
  if (bytes() % width_ != 0) {
    throw FileError(path, fmt::format("{} bytes are not a multiple of {}, the width of an id", bytes(), width_));
  }
  const bool any_id_fits = vocab >= (int64_t{1} << (8 * width_));
  constexpr int64_t kPart = int64_t{1} << 20;
  std::vector<unsigned char> part(static_cast<size_t>(std::min(bytes(), kPart)));
  Hash hash(bytes());
  for (int64_t first = 0; first < bytes(); first += kPart) {
    const int64_t count = std::min(kPart, bytes() - first);
    file_.read(first, part.data(), count);
    hash.add(part.data(), count);
    for (int64_t i = 0; !any_id_fits && i < count; i += width_) {
      const int64_t id = id_at(part.data() + i, width_);
      if (id >= vocab)
        throw FileError(path, fmt::format("token {} is {}, but the vocabulary is {}", (first + i) / width_, id, vocab));
    }
  }
  hash_ = hash.value();
}

void TokenFile::copy(int64_t first, std::span<int32_t> out) const {
  std::vector<unsigned char> ids(out.size() * static_cast<size_t>(width_));
  file_.read(first * width_, ids.data(), std::ssize(ids));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<int32_t>(id_at(ids.data() + i * static_cast<size_t>(width_), width_));
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
