// What verification holds to the oracle: an engine, and the ways in which it can make one call.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verify/case.h"

namespace coda::verify {

/// A way in which an engine makes a call. All of them must leave the same bytes, but for those that add in an order of their own: these
/// leave the same as themselves.
struct Way {
  std::string name;  // "on 3 threads", "by tiles of 128x256"
  std::function<void(AnyCase& c)> run;
  bool own_order = false;
};

class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::string name() const = 0;  // "cpu avx2"
  /// Each of these is held to the oracle; there is at least one, and the first is of the common order.
  virtual std::vector<Way> ways(AnyCase& c) = 0;
  /// And these are held to the bytes of the first.
  virtual std::vector<Way> again(AnyCase& c, Random& random) = 0;
};

/// How much is tried on a GPU. Brief: what compute-sanitizer has time for, under which a launch takes seconds; every kernel, but a few sizes,
/// and calls repeated once.
enum class Extent { full, brief };

/// The GPU engine on the current device; throws DeviceError if it cannot be used. Defined in verify/gpu, which is linked with
/// the GPU half only: without it this is a null pointer, to be asked through gpu_half_is_linked().
[[gnu::weak]] std::unique_ptr<Engine> gpu_engine(Extent extent);
bool gpu_half_is_linked();

}  // namespace coda::verify
