// The CPU engine's handle: its threads.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace coda {

/// A pool of threads. Products, attention and the optimizer run on it; their results do not depend on how many there are.
/// One call at a time: a Cpu is used by one thread of the caller's.
class Cpu {
 public:
  /// threads = 0 takes as many as the process may run on. Throws UsageError for a negative number.
  explicit Cpu(int threads = 0);

  /// Threads of the caller's, such as those of another library's pool: run(count, task) calls task(0), …, task(count − 1) once
  /// each, on whichever threads it likes, and returns when all are done. task throws nothing.
  using Run = std::function<void(int count, const std::function<void(int)>& task)>;
  /// Takes `threads` of them at a time. Throws UsageError for less than 1.
  Cpu(int threads, Run run);
  ~Cpu();
  Cpu(const Cpu&) = delete;
  Cpu& operator=(const Cpu&) = delete;

  int threads() const;

  /// Calls body(index, thread) once for every index in [0, count), thread in [0, threads()); indices are handed out in
  /// ascending order as threads become free. Returns when all are done; the first exception is thrown again here.
  void parallel_for(int64_t count, const std::function<void(int64_t index, int thread)>& body);

  struct Pool;  // the engine's
  Pool& pool() { return *pool_; }

 private:
  std::unique_ptr<Pool> pool_;
};

}  // namespace coda
