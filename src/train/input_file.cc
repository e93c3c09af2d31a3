#include "input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "coda/error.h"
#include "durable_file.h"

namespace coda::train {

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a pipe must not wait for somebody to write into it.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) throw FileError(path_.string(), "cannot be opened: " + errno_message(errno));
  struct stat status {};
  const int error = ::fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (error == 0 && S_ISREG(status.st_mode)) {
    size_ = status.st_size;
    return;
  }
  ::close(descriptor_);
  throw FileError(path_.string(), error != 0 ? "cannot be read: " + errno_message(error) : "is not a regular file");
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

void InputFile::read(int64_t offset, void* bytes, int64_t size) const {
  constexpr int64_t kMostAtOnce = int64_t{1} << 30;  // Linux reads at most 2 GiB in one call
  char* at = static_cast<char*>(bytes);
  while (size > 0) {
    const ssize_t got = ::pread(descriptor_, at, static_cast<size_t>(std::min(size, kMostAtOnce)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(path_.string(), "cannot be read: " + errno_message(errno));
    if (got == 0) throw FileError(path_.string(), "was cut short while it was being read");
    at += got;
    offset += got;
    size -= got;
  }
}

}  // namespace coda::train
