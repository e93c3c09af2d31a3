#include "bench/gpu_step.h"
#include "bench/random_batch.h"
#include "hopper/device_memory.h"
#include "llama/gpu.h"

namespace coda::bench {

GpuStepReport bench_gpu_step(const llama::Config& config, int64_t rows, int64_t seq, const Rounds& rounds) {
  const int64_t m = rows * seq;
  const RandomBatch random(config.vocab, rows, seq);
  const llama::Batch batch = random.batch();
  const llama::AdamW options;

  const int64_t free = hopper::free_memory().free;
  llama::check_gpu_memory(config, {.rows = rows, .seq = seq});
  const std::unique_ptr<llama::Model> model = llama::model_on_gpu(config);
  model->initialize(1);
  GpuStepReport report{};
  report.bytes_of_model = free - hopper::free_memory().free;
  report.flops = step_flops(config, rows, seq);
  report.tokens = m;
  report.parameters = llama::parameter_count(config);
  const auto forward_backward = [&] { model->forward_backward(batch, static_cast<double>(m)); };
  const auto step = [&] {
    forward_backward();
    model->update(options);
  };
  for (int i = 0; i < 3; ++i) step();  // kernels are loaded, the work is captured
  forward_backward();                  // adds to the gradients: a graph of its own
  model->update(options);
  const std::vector<Time> times = measure({{"step", step}, {"forward and backward", forward_backward}}, rounds);
  report.step = times[0];
  report.forward_backward = times[1];
  report.bytes = free - hopper::free_memory().free;
  return report;
}

}  // namespace coda::bench
