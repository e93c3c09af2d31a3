// Which engine an operator runs on: that of its tensors' device, in the type of its activations.
#pragma once
#include "coda/cpu.h"
#include "coda/gpu.h"
#include "llama/layer.h"
#include "tensor.h"

namespace coda::torch_ops {

/// The CPU engine on PyTorch's threads, with memory that the calling thread's operators reuse.
Cpu& cpu();

using llama::gemm_over_tokens;

#ifdef CODA_TORCH_GPU
/// The GPU engine on a stream of PyTorch's. What a product needs of workspace comes from PyTorch's allocator.
class TorchGpu : public Gpu {
 public:
  TorchGpu(const Gpu& gpu, const Tensor& like) : Gpu(gpu), like_(like) {}
  /// Freed with the tensor, and used again for later work of the same stream only.
  Tensor bytes(int64_t count) const { return empty(like_, {count}, ScalarType::Byte); }

 private:
  Tensor like_;
};

/// As coda::gemm on a Gpu, with its workspace where it needs one.
template <class A, class B, class P>
void gemm(const TorchGpu& gpu, const A& a, const B& b, const P& program, DepthSlices slices = {}) {
  const int64_t bytes = gemm_workspace(a, b, program, slices);
  if (bytes == 0) return coda::gemm(static_cast<const Gpu&>(gpu), a, b, program);
  const Tensor workspace = gpu.bytes(bytes);
  Gpu with_workspace = gpu;
  with_workspace.set_workspace(workspace.data_ptr(), bytes);
  coda::gemm(with_workspace, a, b, program, slices);
}

/// A weight's gradient, in slices of the tokens where that is predicted to pay.
template <class A, class B, class P>
void gemm_over_tokens(TorchGpu& gpu, const A& a, const B& b, const P& program) {
  gemm(gpu, a, b, program, depth_slices(gpu, a, b, program));
}

/// On PyTorch's current stream of the tensor's device. Throws DeviceError for a GPU or a driver that coda cannot run on.
TorchGpu gpu(const Tensor& like);
#endif

/// What body.operator()<Engine, E>(engine) returns, with E the type of `activations`. Throws OperandError for another type, DeviceError for a device
/// that this build does not serve.
template <class Body>
auto on_engine(const Tensor& activations, const Body& body) {
  const ScalarType type = activations.scalar_type();
  if (activations.is_cpu()) {
    if (type == ScalarType::Float) return body.template operator()<Cpu, float>(cpu());
    if (type == ScalarType::BFloat16) return body.template operator()<Cpu, bf16>(cpu());
    throw OperandError("the activations' type", "neither", "float32 or bfloat16");
  }
  if (!activations.is_cuda()) throw DeviceError("coda runs on tensors of a CPU or of a CUDA device");
#ifdef CODA_TORCH_GPU
  if (type != ScalarType::BFloat16) throw OperandError("the activations' type", "another", "bfloat16 on a GPU");
  TorchGpu engine = gpu(activations);
  return body.template operator()<TorchGpu, bf16>(engine);
#else
  throw DeviceError("this build of coda_torch has no GPU half: build it with CODA_CUDA=ON");
#endif
}

}  // namespace coda::torch_ops

#ifdef CODA_TORCH_GPU
/// Attention is the caller's.
template <>
struct coda::llama::EngineTraits<coda::torch_ops::TorchGpu> {
  struct Documents {};
};
#endif
