#include "coda/cpu.h"

#include <immintrin.h>
#include <sched.h>

#include <string>
#include <utility>

#include "coda/error.h"
#include "pool.h"

namespace coda {

namespace {

int available_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// Waits while value == seen: a short spin, since rounds of one step follow each other within microseconds, then asleep.
template <class T>
void wait_while(const std::atomic<T>& value, T seen) {
  for (int spin = 0; spin < 4000; ++spin) {
    if (value.load(std::memory_order_acquire) != seen) return;
    _mm_pause();
  }
  value.wait(seen, std::memory_order_acquire);
}

}  // namespace

Cpu::Cpu(int threads) {
  if (threads < 0) throw UsageError("threads is " + std::to_string(threads) + "; it needs 0 (all) or more");
  pool_ = std::make_unique<Pool>(threads == 0 ? std::max(1, available_threads()) : threads);
}
Cpu::Cpu(int threads, Run run) {
  if (threads < 1) throw UsageError("threads is " + std::to_string(threads) + "; it needs to be 1 or more");
  pool_ = std::make_unique<Pool>(threads, std::move(run));
}
Cpu::~Cpu() = default;

int Cpu::threads() const {
  return static_cast<int>(pool_->thread_scratch.size());
}

void Cpu::parallel_for(int64_t count, const std::function<void(int64_t, int)>& body) {
  pool_->run(count, body);
}

Cpu::Pool::Pool(int threads) : thread_scratch(static_cast<size_t>(threads)) {
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Cpu::Pool::~Pool() {
  stop_ = true;
  round_ = ~uint64_t{0};
  round_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Cpu::Pool::run(int64_t count, const std::function<void(int64_t, int)>& body) {
  if (count <= 0) return;
  if (count == 1 || thread_scratch.size() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  const uint64_t round = (round_ + 1) & (~uint64_t{0} >> kIndexBits);
  // Closed while it is set up: a late worker must not take an index beyond the last round's.
  next_ = round << kIndexBits | kIndexMask;
  body_ = &body;
  count_ = count;
  done_ = 0;
  failed_ = false;
  failure_ = nullptr;
  next_ = round << kIndexBits;
  round_ = round;
  if (run_elsewhere_) {
    run_elsewhere_(static_cast<int>(std::min<int64_t>(count, static_cast<int64_t>(thread_scratch.size()))),
                   [&](int thread) { take_indices(round, thread); });
  } else {
    round_.notify_all();
    take_indices(round, 0);
  }
  for (int64_t done = done_; done != count; done = done_) wait_while(done_, done);
  if (failure_) std::rethrow_exception(failure_);
}

void Cpu::Pool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    wait_while(round_, seen);
    seen = round_;
    if (stop_) return;
    take_indices(seen, thread);
  }
}

void Cpu::Pool::take_indices(uint64_t round, int thread) {
  while (true) {
    uint64_t taken = next_;
    do {
      if (taken >> kIndexBits != round || static_cast<int64_t>(taken & kIndexMask) >= count_) return;
    } while (!next_.compare_exchange_weak(taken, taken + 1));
    try {
      if (!failed_) (*body_)(static_cast<int64_t>(taken & kIndexMask), thread);
    } catch (...) {
      const std::lock_guard lock(failure_mutex_);
      if (!failure_) failure_ = std::current_exception();
      failed_ = true;
    }
    const int64_t count = count_;  // the round cannot end before this index is counted
    if (++done_ == count) done_.notify_all();
  }
}

}  // namespace coda
