#include "stopwatch.h"

#include <chrono>
#include <thread>

namespace coda::bench {

namespace {
constexpr int64_t kFlush = int64_t{256} << 20;  // several times the L2 cache
constexpr auto kRest = std::chrono::milliseconds(15);
// What the stream waits for the host in front of a single launch: longer than enqueueing it takes.
constexpr auto kHeadStart = std::chrono::milliseconds(1);
}  // namespace

Stopwatch::Stopwatch(const Stream& stream, const Nvml& nvml) : stream_(stream), nvml_(nvml), flush_(kFlush) {}

Stopwatch::Reading Stopwatch::back_to_back(const Launch& launch, int launches) {
  launch(0);
  begin_.record(stream_);
  for (int i = 0; i < launches; ++i) launch(1 - i % 2);
  end_.record(stream_);
  const CardState card = nvml_.state();
  return {begin_.seconds_to(end_) / launches, card};
}

Stopwatch::Reading Stopwatch::alone(const Launch& launch, int set) {
  check_cuda(cudaMemsetAsync(flush_.as<void>(), 0, static_cast<size_t>(flush_.bytes()), stream_.get()),
             "cudaMemsetAsync");
  stream_.synchronize();
  std::this_thread::sleep_for(kRest);
  check_cuda(cudaLaunchHostFunc(
                 stream_.get(), [](void*) { std::this_thread::sleep_for(kHeadStart); }, nullptr),
             "cudaLaunchHostFunc");
  begin_.record(stream_);
  launch(set);
  end_.record(stream_);
  const double seconds = begin_.seconds_to(end_);
  return {seconds, nvml_.state()};
}

}  // namespace coda::bench
