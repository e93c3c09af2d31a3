#include "durable_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <system_error>
#include <utility>

#include "coda/error.h"

namespace coda::train {
namespace {

/// A write past the file size limit raises SIGXFSZ, which would end the program before write() can return EFBIG.
class WithoutFileSizeSignal {
 public:
  WithoutFileSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~WithoutFileSizeSignal() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  void take_pending() const {
    const timespec at_once{};
    sigtimedwait(&signal_, nullptr, &at_once);
  }

 private:
  sigset_t signal_, before_;
};

void sync_folder_of(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw FileError(folder.string(), "cannot be opened: " + errno_message(errno));
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  // Some network file systems cannot sync a folder and say so with EINVAL; there is nothing more to do there.
  if (error != 0 && error != EINVAL) {
    throw FileError(folder.string(), "cannot be forced to the disk: " + errno_message(error));
  }
}

}  // namespace

std::string errno_message(int error) {
  return std::generic_category().message(error);
}

DurableFile::DurableFile(std::filesystem::path path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw FileError(path_.string(), "cannot be created: " + errno_message(errno));
  struct stat status {};
  regular_ = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
}

DurableFile::~DurableFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  if (regular_) ::unlink(path_.c_str());  // never a device that somebody named
}

void write_bytes(int descriptor, const std::filesystem::path& path, const void* bytes, size_t size) {
  constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux writes at most 2 GiB in one call
  const WithoutFileSizeSignal without_signal;
  const char* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t written = ::write(descriptor, at, std::min(size, kMostAtOnce));
    if (written < 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error == EFBIG) without_signal.take_pending();
      throw FileError(path.string(), "cannot be written: " + errno_message(error));
    }
    at += written;
    size -= static_cast<size_t>(written);
  }
}

void DurableFile::write(const void* bytes, size_t size) {
  write_bytes(descriptor_, path_, bytes, size);
}

void DurableFile::finish() {
  if (::fsync(descriptor_) != 0) {
    throw FileError(path_.string(), "cannot be forced to the disk: " + errno_message(errno));
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) {
    const int error = errno;
    if (regular_) ::unlink(path_.c_str());
    throw FileError(path_.string(), "cannot be written: " + errno_message(error));
  }
  sync_folder_of(path_);
}

void commit_rename(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    throw FileError(to.string(), "cannot be replaced by " + from.string() + ": " + errno_message(errno));
  }
  sync_folder_of(to);
}

void remove_durably(const std::filesystem::path& path) {
  if (::unlink(path.c_str()) != 0) {
    if (errno == ENOENT) return;
    throw FileError(path.string(), "cannot be removed: " + errno_message(errno));
  }
  sync_folder_of(path);
}

std::filesystem::path partial_name(const std::filesystem::path& path) {
  std::filesystem::path partial = path;
  partial += ".partial";
  return partial;
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  DurableFile file(path);
  file.write(text.data(), text.size());
  file.finish();
}

void replace_file(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path partial = partial_name(path);
  write_file(partial, text);
  commit_rename(partial, path);
}

}  // namespace coda::train
