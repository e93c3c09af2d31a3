// An engine that has no memory: buffers of it know what they would take. The constructors that allocate a model's memory on other
// engines count it on this one.
#pragma once
#include "layer.h"

namespace coda::llama {

class Counted {};

template <class T>
class CountedBuffer {
 public:
  CountedBuffer() = default;
  CountedBuffer(int64_t rows, int64_t cols)
      : bytes_(static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(sizeof(T))) {}
  double bytes() const { return bytes_; }

 private:
  double bytes_ = 0;
};

template <>
struct EngineTraits<Counted> {
  template <class T>
  using Buffer = CountedBuffer<T>;
  using Documents = std::span<const int64_t>;
};

/// What Pass (model_impl.h) takes on any engine. E is float or bf16.
template <class E>
double pass_bytes(const Config& config, int64_t tokens, bool backward);

}  // namespace coda::llama
