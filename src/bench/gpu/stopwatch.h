// Times of launches by CUDA's events, in the two regimes.
#pragma once
#include <functional>

#include "device.h"
#include "nvml.h"

namespace coda::bench {

/// Enqueues one launch over one of two sets of operands, 0 or 1.
using Launch = std::function<void(int set)>;

class Stopwatch {
 public:
  Stopwatch(const Stream& stream, const Nvml& nvml);

  struct Reading {
    double seconds;  // of one launch
    CardState card;  // while it ran
  };
  /// Launches one after another, sets taking turns; another one runs in front of them, while the host enqueues. launches: even.
  Reading back_to_back(const Launch& launch, int launches);
  /// A launch alone, on a card that has rested, with nothing of it in the L2 cache; the host has enqueued it before it starts.
  Reading alone(const Launch& launch, int set);

 private:
  const Stream& stream_;
  const Nvml& nvml_;
  Event begin_, end_;
  DeviceMemory flush_;
};

}  // namespace coda::bench
