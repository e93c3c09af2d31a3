#include "engine.h"

#include <map>
#include <memory>

#ifdef CODA_TORCH_GPU
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

namespace coda::torch_ops {

Cpu& cpu() {
  thread_local std::unique_ptr<Cpu> engine;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  if (engine == nullptr || engine->threads() != threads)
    engine = std::make_unique<Cpu>(threads, [](int count, const std::function<void(int)>& task) {
      torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) task(static_cast<int>(i));
      });
    });
  return *engine;
}

#ifdef CODA_TORCH_GPU
// libtorch_cuda's; a PyTorch for CPUs does not have it, and loads this library all the same.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream)
    __attribute__((weak));

TorchGpu gpu(const Tensor& like) {
  const int device = like.get_device();
  if (aoti_torch_get_current_cuda_stream == nullptr) throw DeviceError("this PyTorch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  // A Gpu asks the driver when it is made; a process has few streams.
  thread_local std::map<std::pair<int, void*>, Gpu> known;
  auto found = known.find({device, stream});
  if (found == known.end())
    found = known.emplace(std::pair(device, stream), Gpu(static_cast<Gpu::Stream>(stream), device)).first;
  return {found->second, like};
}
#endif

}  // namespace coda::torch_ops
