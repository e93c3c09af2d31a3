#include "cpu_parameters.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "optimizer_rows.h"

namespace coda::llama {

namespace {

constexpr int64_t kTaskElements = int64_t{1} << 16;

/// Rows of a matrix that one thread handles together.
struct RowsTask {
  int parameter;
  int64_t first, count;
};

std::vector<RowsTask> row_tasks(const Parameters& parameters) {
  std::vector<RowsTask> tasks;
  for (size_t p = 0; p < parameters.all().size(); ++p) {
    const Parameter& parameter = parameters.all()[p];
    if (!parameter.decays) continue;
    const int64_t step = std::max<int64_t>(1, kTaskElements / parameter.cols);
    for (int64_t first = 0; first < parameter.rows; first += step)
      tasks.push_back({static_cast<int>(p), first, std::min(step, parameter.rows - first)});
  }
  return tasks;
}

void fill(Buffer<float>& buffer, float value) {
  std::fill(buffer.span().begin(), buffer.span().end(), value);
}

}  // namespace

CpuParameters allocate(const Parameters& parameters) {
  CpuParameters memory;
  for (const Parameter& p : parameters.all()) {
    ParameterMemory<Cpu>& m = memory.emplace_back(p);
    for (const Values which : {Values::master, Values::gradient})
      fill(m[which], std::numeric_limits<float>::quiet_NaN());
    for (const Values which : {Values::moment1, Values::moment2}) fill(m[which], 0);
  }
  return memory;
}

template <class E>
Weights<E>::Weights(const Parameters& parameters, CpuParameters& memory)
    : copies_(memory.size()), views_(memory.size()) {
  for (size_t i = 0; i < copies_.size(); ++i) {
    const Parameter& p = parameters.all()[i];
    if (!parameters.is_multiplied(static_cast<int>(i))) continue;
    if constexpr (std::is_same_v<E, float>) {
      if (p.gamma < 0) {
        views_[i] = memory[i].master.matrix();
        continue;
      }
    }
    copies_[i] = Buffer<E>(p.rows, p.cols);
    views_[i] = copies_[i].matrix();
  }
}

template <class E>
void Weights<E>::write_rows(const Parameters& parameters, const CpuParameters& memory, int parameter, int64_t first,
                            int64_t count) {
  Buffer<E>& copy = copies_[static_cast<size_t>(parameter)];
  if (copy.rows() == 0) return;
  const Parameter& p = parameters[parameter];
  const auto master = [&](int index) { return memory[static_cast<size_t>(index)].master.matrix(); };
  const float* gamma = p.gamma < 0 ? nullptr : master(p.gamma).data;
  const OptimizerRows rows = optimizer_rows();
  for (int64_t i = first; i < first + count; ++i) {
    if constexpr (std::is_same_v<E, float>)
      rows.fold_float(master(parameter).row(i), gamma, copy.matrix().row(i), p.cols);
    else
      rows.fold_bf16(master(parameter).row(i), gamma, copy.matrix().row(i), p.cols);
  }
}

template <class E>
void Weights<E>::write_all(Cpu& cpu, const Parameters& parameters, const CpuParameters& memory) {
  const std::vector<RowsTask> tasks = row_tasks(parameters);
  cpu.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
    const RowsTask& task = tasks[static_cast<size_t>(i)];
    write_rows(parameters, memory, task.parameter, task.first, task.count);
  });
}

template <class E>
double adamw_update(Cpu& cpu, const Parameters& parameters, CpuParameters& memory, Weights<E>& weights,
                    const AdamW& options, int64_t t) {
  const auto memory_of = [&](int index) -> ParameterMemory<Cpu>& { return memory[static_cast<size_t>(index)]; };
  const OptimizerRows rows = optimizer_rows();
  const std::vector<RowsTask> tasks = row_tasks(parameters);
  const auto for_tasks = [&](auto&& body) {
    cpu.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
      const RowsTask& task = tasks[static_cast<size_t>(i)];
      body(static_cast<size_t>(i), task, parameters[task.parameter], memory_of(task.parameter));
    });
  };

  // From the folded gradients to those of W and gamma, and all squares. A task's part of d_gamma is its own, and the parts
  // are added in order: the same bits for any number of threads.
  std::vector<std::vector<float>> d_gamma(tasks.size());
  std::vector<double> squares(tasks.size());
  for_tasks([&](size_t index, const RowsTask& task, const Parameter& p, ParameterMemory<Cpu>& m) {
    if (p.gamma >= 0) {
      const bool twice = p.read_twice;
      d_gamma[index].assign(static_cast<size_t>(p.cols), 0.f);
      for (int64_t i = task.first; i < task.first + task.count; ++i)
        rows.unfold((twice ? m.folded_gradient : m.gradient).matrix().row(i), m.master.matrix().row(i),
                    memory_of(p.gamma).master.matrix().data, twice, m.gradient.matrix().row(i), d_gamma[index].data(),
                    p.cols);
    }
    squares[index] = rows.squares(m.gradient.matrix().row(task.first), task.count * p.cols);
  });
  double sum = 0;
  const auto for_vectors = [&](auto&& body) {
    for (size_t i = 0; i < memory.size(); ++i)
      if (!parameters.all()[i].decays) body(memory[i], parameters.all()[i].cols);
  };
  for_vectors([](ParameterMemory<Cpu>& m, int64_t) { fill(m.gradient, 0); });
  for (size_t i = 0; i < tasks.size(); ++i) {
    sum += squares[i];
    const int gamma = parameters[tasks[i].parameter].gamma;
    if (gamma < 0) continue;
    const std::span<float> total = memory_of(gamma).gradient.span();
    for (size_t j = 0; j < total.size(); ++j) total[j] += d_gamma[i][j];
  }
  for_vectors([&](ParameterMemory<Cpu>& m, int64_t n) { sum += rows.squares(m.gradient.matrix().data, n); });
  const double norm = std::sqrt(sum);
  if (!std::isfinite(norm)) return norm;

  const double scale = options.clip > 0 ? std::min(1.0, options.clip / (norm + 1e-6)) : 1.0;
  AdamWStep step = adamw_step(options, t);
  step.gradient_scale = static_cast<float>(scale);
  AdamWStep vector_step = step;
  vector_step.decay = 1;
  // Norm weights first: the matrices are folded with what they become.
  for_vectors([&](ParameterMemory<Cpu>& m, int64_t n) {
    rows.adamw(m.master.matrix().data, m.moment1.matrix().data, m.moment2.matrix().data, m.gradient.matrix().data, n,
               vector_step);
  });
  for_tasks([&](size_t, const RowsTask& task, const Parameter& p, ParameterMemory<Cpu>& m) {
    const int64_t offset = task.first * p.cols;
    rows.adamw(m.master.matrix().data + offset, m.moment1.matrix().data + offset, m.moment2.matrix().data + offset,
               m.gradient.matrix().data + offset, task.count * p.cols, step);
    weights.write_rows(parameters, memory, task.parameter, task.first, task.count);
  });
  return norm;
}

template class Weights<float>;
template class Weights<bf16>;
template double adamw_update(Cpu&, const Parameters&, CpuParameters&, Weights<float>&, const AdamW&, int64_t);
template double adamw_update(Cpu&, const Parameters&, CpuParameters&, Weights<bf16>&, const AdamW&, int64_t);

}  // namespace coda::llama
