// The inside of a Cpu: its threads and the memory that its calls reuse.
#pragma once
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "coda/cpu.h"
#include "memory.h"

namespace coda {

namespace cpu {

/// Memory that grows and is reused; 64-byte aligned; not cleared.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_ = allocate<float>(count);
      capacity_ = count;
    }
    return memory_.get();
  }

 private:
  Memory<float> memory_;
  int64_t capacity_ = 0;
};

}  // namespace cpu

struct Cpu::Pool {
  explicit Pool(int threads);
  Pool(int threads, Cpu::Run run) : thread_scratch(static_cast<size_t>(threads)), run_elsewhere_(std::move(run)) {}
  ~Pool();

  void run(int64_t count, const std::function<void(int64_t, int)>& body);

  std::vector<cpu::Scratch> thread_scratch;  // one for each thread
  cpu::Scratch shared_scratch;

 private:
  void work(int thread);
  void take_indices(uint64_t round, int thread);

  // A round is one call of run. The caller waits for its indices, not for the workers: one that the system has not woken in time
  // finds the round over and goes back to sleep.
  static constexpr int kIndexBits = 40;
  static constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
  std::vector<std::thread> workers_;
  Cpu::Run run_elsewhere_;          // in their place, on threads of the caller's
  std::atomic<uint64_t> round_{0};  // workers wait for it to change
  std::atomic<uint64_t> next_{0};   // (round, next index): an index is only taken in the round that it belongs to
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  const std::function<void(int64_t, int)>* body_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace coda
