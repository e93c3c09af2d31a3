#include "device.h"

#include <fmt/format.h>

#include <algorithm>

namespace coda::bench {

namespace {
// Eight times a prime: rows whose length is a multiple of eight and not of this one each start elsewhere in the period, and copies
// stay aligned.
constexpr int64_t kPeriod = int64_t{8} * 524287;
constexpr size_t kNormals = size_t{1} << 16;
}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw DeviceError(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

DeviceMemory::DeviceMemory(int64_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes)); error != cudaSuccess) {
    cudaGetLastError();  // or the next call would report it
    throw DeviceError(fmt::format("{} MB of the GPU's memory: {}", bytes >> 20, cudaGetErrorString(error)));
  }
  data_.reset(data);
}

double Event::seconds_to(const Event& later) const {
  check_cuda(cudaEventSynchronize(later.event_), "the measured work");
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, event_, later.event_), "cudaEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

RandomOperands::RandomOperands() : normal_(kNormals) {
  std::normal_distribution<float> normal;
  std::ranges::generate(normal_, [&] { return normal(generator_); });
}

template <class T>
void RandomOperands::fill(T* device, int64_t count, double deviation) {
  const int64_t period = std::min(count, kPeriod);
  std::vector<T> values(static_cast<size_t>(period));
  uint64_t bits = 0;
  for (int64_t i = 0; i < period; ++i) {
    if (i % 4 == 0) bits = generator_();
    values[static_cast<size_t>(i)] = static_cast<T>(static_cast<float>(deviation) * normal_[bits % kNormals]);
    bits /= kNormals;
  }
  upload(values, device);
  for (int64_t done = period; done < count;) {
    const int64_t more = std::min(done, count - done);
    check_cuda(cudaMemcpy(device + done, device, static_cast<size_t>(more) * sizeof(T), cudaMemcpyDeviceToDevice),
               "cudaMemcpy");
    done += more;
  }
}
template void RandomOperands::fill(bf16*, int64_t, double);
template void RandomOperands::fill(float*, int64_t, double);

}  // namespace coda::bench
