// The GPU engine's front door: products and maps on a stream of a Hopper GPU (compute capability 9.0). Everything here is
// ordinary C++: a file that includes it needs no CUDA compiler. Programs are instantiated in .cu files (coda/hopper/kernels.h).
//
// Activations are bf16. No call allocates, synchronises, or changes the current device for its caller; all of them can be captured
// in a CUDA graph.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "coda/gemm.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace coda {

/// A GPU that coda cannot run on, or a CUDA call that failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A stream of one GPU, and memory there that calls may use while they run. Calls of one Gpu come from one thread at a time.
class Gpu {
 public:
  using Stream = CUstream_st*;

  /// stream belongs to the device; null is its default stream. device −1: the calling thread's current one. Throws DeviceError
  /// that names what is needed and what was found: no GPU, one that is not of compute capability 9.0, a driver that is too old.
  explicit Gpu(Stream stream = nullptr, int device = -1);

  Stream stream() const { return stream_; }
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }
  /// "NVIDIA H200".
  const std::string& name() const { return name_; }

  /// Memory of the device, 256-byte aligned, for calls that say they need some (gemm_workspace). It must stay until the work
  /// that was started with it is done.
  void set_workspace(void* data, int64_t bytes);
  void* workspace() const { return workspace_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  Stream stream_;
  int device_ = 0, multiprocessors_ = 0;
  std::string name_;
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

/// Into how many slices the depth of a product is cut. They are multiplied beside each other, which fills a GPU where the tiles of one do
/// not: the gradient of a small weight over many tokens, a few rows of a long product. Their fp32 accumulators go through the workspace
/// and are added in ascending order in front of the program, so that the same number leaves the same bits each time, and another number
/// others: it is the caller's to choose. More than one for each 64 of the depth are as many as that.
struct DepthSlices {
  int count = 1;
};

namespace detail {

/// Which factors of a·bᵀ lie transposed in memory: none (x Wᵀ), b (dy W), both (dyᵀ x).
enum class Form { TN, NN, NT };

/// Rows × columns of the accumulators that a thread block works on at a time, and how its two warp groups share the work: taking
/// tiles in turns, so that one's epilogue runs under the other's main loop, or half of the rows each.
enum class HopperTile {
  pingpong_128x128,
  cooperative_128x128,
  pingpong_64x256,
  cooperative_128x256,
  cooperative_256x128
};

/// One launch of a fused product. Factors and tiles are aligned as TMA needs it: addresses and rows of multiples of 16 bytes.
struct HopperProduct {
  Factor a, b;
  const void* program;
  CUstream_st* stream;
  int device, multiprocessors;
  int band;    // rows of clusters, of two tiles each, that run side by side
  bool early;  // programmatic dependent launch: starts as the kernel in front ends, and waits for it before it reads
};

/// One launch of a program over a stored matrix [M, N] of float or bf16, whatever the alignment.
struct HopperMap {
  Factor x;  // never transposed
  std::span<const Operand> operands;
  const void* program;
  CUstream_st* stream;
  int multiprocessors;
};

/// Each returns a cudaError_t.
struct HopperKernel {
  Form form;
  HopperTile tile;
  int (*launch)(const HopperProduct&);
};
/// A program's instantiations on the GPU.
struct HopperKernels {
  std::span<const HopperKernel> products;
  int (*map)(const HopperMap&);
  std::string_view name{};  // as CODA_HOPPER_PROGRAM spells the program: what tuned plans are kept under
};
/// Defined by CODA_HOPPER_PROGRAM in a .cu file.
template <class P>
const HopperKernels& hopper_kernels();

/// Checks everything, then starts the work. Defined in src/hopper/product.cc.
void run_product(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                 const HopperKernels& kernels, DepthSlices slices = {});
void run_map(const Gpu& gpu, const Factor& tile, const ProgramInfo& program, const HopperKernels& kernels);
int64_t product_workspace(const Factor& a, const Factor& b, const ProgramInfo& program, const HopperKernels& kernels,
                          DepthSlices slices = {});
DepthSlices choose_slices(const Gpu& gpu, const Factor& a, const Factor& b, const ProgramInfo& program,
                          const HopperKernels& kernels);

}  // namespace detail

/// Runs program over the accumulators of a·bᵀ on gpu's stream, as gemm does on a Cpu; a and b are bf16, every pointer of the program
/// is to memory of the device, and its activations are bf16. Where an address or a row of a factor or tile is not a multiple of 16
/// bytes the product runs in two passes through the workspace, which is several times slower. Throws OperandError (or
/// OverlapError), also for a workspace that is too small, before anything is written, and DeviceError if CUDA refuses the launch.
template <class A, class B, class P>
void gemm(const Gpu& gpu, const A& a, const B& b, const P& program, DepthSlices slices = {}) {
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    detail::run_product(gpu, detail::factor(a), detail::factor(b), info, detail::hopper_kernels<P>(), slices);
  });
}

/// Bytes of workspace that this call of gemm needs; 0 of one slice where everything is aligned.
template <class A, class B, class P>
int64_t gemm_workspace(const A& a, const B& b, const P& program, DepthSlices slices = {}) {
  int64_t bytes = 0;
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    bytes = detail::product_workspace(detail::factor(a), detail::factor(b), info, detail::hopper_kernels<P>(), slices);
  });
  return bytes;
}

/// The slices by which this call of gemm is predicted to take least; 1 where cutting does not save 5 %. Depends on the sizes, the
/// program and the GPU's multiprocessors only.
template <class A, class B, class P>
DepthSlices depth_slices(const Gpu& gpu, const A& a, const B& b, const P& program) {
  DepthSlices slices;
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    slices = detail::choose_slices(gpu, detail::factor(a), detail::factor(b), info, detail::hopper_kernels<P>());
  });
  return slices;
}

/// Runs program over a stored matrix of float or bf16, [M, N], on gpu's stream.
template <class T, class P>
void map(const Gpu& gpu, const Matrix<T>& x, const P& program) {
  detail::with_program(program, [&](const detail::ProgramInfo& info) {
    detail::run_map(gpu, detail::factor(x), info, detail::hopper_kernels<P>());
  });
}

}  // namespace coda
