#include "hopper/replay.h"

#include "hopper/device_guard.h"

namespace coda::hopper {

struct Replay::Graph {
  cudaGraphExec_t exec = nullptr;
  ~Graph() { cudaGraphExecDestroy(exec); }
};

Replay::Replay() = default;
Replay::~Replay() = default;
Replay::Replay(Replay&&) noexcept = default;
Replay& Replay::operator=(Replay&&) noexcept = default;

namespace {

/// What enqueue does on the stream, not done. Capture ends whatever happens: a stream left in it would be lost.
cudaGraph_t capture(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  return graph;
}

}  // namespace

void Replay::run(const Gpu& gpu, const std::function<void()>& enqueue) {
  const DeviceGuard current(gpu.device());
  if (!ran_) {
    enqueue();
    ran_ = true;
    return;
  }
  if (!graph_) {
    const cudaGraph_t graph = capture(gpu.stream(), enqueue);
    auto made = std::make_unique<Graph>();
    const cudaError_t error = cudaGraphInstantiate(&made->exec, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
    graph_ = std::move(made);
  }
  check(cudaGraphLaunch(graph_->exec, gpu.stream()), "cudaGraphLaunch");
}

}  // namespace coda::hopper
