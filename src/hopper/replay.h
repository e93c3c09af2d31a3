// Work on a GPU that is enqueued over and over, as a CUDA graph.
#pragma once
#include <functional>
#include <memory>

#include "coda/gpu.h"

namespace coda::hopper {

/// Runs the same work again and again: the first time call by call, so that kernels are loaded and mistakes are found, the second
/// time captured, from then on replayed. What changes from time to time is read from the device's memory.
class Replay {
 public:
  Replay();
  ~Replay();
  Replay(Replay&&) noexcept;
  Replay& operator=(Replay&&) noexcept;

  /// enqueue puts the work on gpu's stream, which is not the default stream; it may not wait. Does not wait either. Throws
  /// DeviceError if CUDA refuses.
  void run(const Gpu& gpu, const std::function<void()>& enqueue);

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
  bool ran_ = false;
};

}  // namespace coda::hopper
