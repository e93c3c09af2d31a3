#include "coda/cpu.h"

#include <immintrin.h>
#include <sched.h>

#include <string>

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
  ++round_;
  round_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Cpu::Pool::run(int64_t count, const std::function<void(int64_t, int)>& body) {
  if (count <= 0) return;
  if (count == 1 || workers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  body_ = &body;
  count_ = count;
  next_ = 0;
  failure_ = nullptr;
  busy_ = static_cast<int>(workers_.size());
  ++round_;
  round_.notify_all();
  take_indices(0);
  for (int left = busy_; left != 0; left = busy_) wait_while(busy_, left);
  if (failure_) std::rethrow_exception(failure_);
}

void Cpu::Pool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    wait_while(round_, seen);
    seen = round_;
    if (stop_) return;
    take_indices(thread);
    if (--busy_ == 0) busy_.notify_one();
  }
}

void Cpu::Pool::take_indices(int thread) {
  try {
    for (int64_t i = next_++; i < count_; i = next_++) (*body_)(i, thread);
  } catch (...) {
    next_ = count_;
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace coda
