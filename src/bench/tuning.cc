#include "tuning.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "coda/error.h"
#include "train/durable_file.h"

namespace coda::bench {

namespace {

/// The only one of all processes that has it, for as long as it lives. A file of its own: the other one is replaced.
class Lock {
 public:
  explicit Lock(const std::filesystem::path& path)
      : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) throw FileError(path.string(), "cannot be created: " + train::errno_message(errno));
    int locked = 0;
    do locked = ::flock(descriptor_, LOCK_EX);
    while (locked != 0 && errno == EINTR);
    if (locked == 0) return;
    const int error = errno;
    ::close(descriptor_);
    throw FileError(path.string(), "cannot be locked: " + train::errno_message(error));
  }
  ~Lock() { ::close(descriptor_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int descriptor_;
};

}  // namespace

void record_plans(const std::filesystem::path& path, std::span<const hopper::TunedEntry> entries) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  if (error) throw FileError(path.parent_path().string(), "cannot be created: " + error.message());
  const Lock lock(path.string() + ".lock");
  hopper::TunedPlans plans = hopper::load_plans(path);
  for (const hopper::TunedEntry& entry : entries) plans.put(entry);
  train::replace_file(path, plans.json());
}

}  // namespace coda::bench
