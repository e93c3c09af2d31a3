#include "subject.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "hopper/product.h"
#include "operands.h"

namespace coda::bench {

namespace {

template <class P>
class SubjectOf : public Subject {
 public:
  SubjectOf(Gpu& gpu, const GpuCase& product, const std::vector<Factors>& factors, RandomOperands& random)
      : gpu_(gpu), product_(product), factors_(factors) {
    int64_t bytes = 0;
    for (int set = 0; set < 2; ++set) {
      operands_.emplace_back(product.m, product.n, random);
      with_factors(set, [&](const auto& a, const auto& b) {
        const P program = operands_.back().program();
        slices_ = product.slices > 0 ? DepthSlices{product.slices} : depth_slices(gpu, a, b, program);
        bytes = std::max(bytes, gemm_workspace(a, b, program, slices_));
      });
    }
    if (bytes > 0) workspace_ = DeviceMemory(bytes);
    gpu.set_workspace(workspace_.as<void>(), bytes);
  }
  ~SubjectOf() override { gpu_.set_workspace(nullptr, 0); }
  SubjectOf(const SubjectOf&) = delete;
  SubjectOf& operator=(const SubjectOf&) = delete;

  void launch(int set) override {
    with_factors(set, [&](const auto& a, const auto& b) {
      gemm(gpu_, a, b, operands_[static_cast<size_t>(set)].program(), slices_);
    });
  }
  int slices() const override { return slices_.count; }

  void launch(int set, const hopper::Plan& plan) override {
    with_call(set, [&](const detail::Factor& a, const detail::Factor& b, const detail::ProgramInfo& program) {
      hopper::run_fused(gpu_, a, b, program, plan);
    });
  }
  const detail::HopperKernels& kernels() const override { return detail::hopper_kernels<P>(); }
  hopper::Problem problem() const override {
    std::optional<hopper::Problem> problem;
    with_call(0, [&](const detail::Factor& a, const detail::Factor& b, const detail::ProgramInfo& program) {
      problem = hopper::problem_of(a, b, program, gpu_.multiprocessors());
    });
    return *problem;
  }

  std::vector<OutputError> errors(const Reference& reference) override {
    const DeviceOperands<P>& operands = operands_[0];
    const SampledOperands<P> before(operands.program(), reference.rows);
    operands.poison();
    check_cuda(cudaDeviceSynchronize(), "filling the operands");
    launch(0);
    check_cuda(cudaDeviceSynchronize(), "the product");
    const SampledOperands<P> after(operands.program(), reference.rows);
    const oracle::Outputs<double> wanted = oracle::apply(reference.acc, before.program());
    const Grids got = after.outputs(), bf16 = bf16_path(reference.acc, before.program());
    std::vector<OutputError> errors;
    errors.reserve(got.size());
    for (size_t i = 0; i < got.size(); ++i)
      errors.push_back({std::string(wanted.list[i].name), relative_error(got[i], wanted.list[i].value),
                        relative_error(bf16[i], wanted.list[i].value)});
    return errors;
  }

 private:
  template <class Body>
  void with_factors(int set, Body&& body) const {
    const Factors& factors = factors_[static_cast<size_t>(set)];
    const auto& [row, hidden, m, n, k, slices] = product_;
    const auto* a = factors.a.template as<bf16>();
    const auto* b = factors.b.template as<bf16>();
    switch (row->form) {
      case Form::TN:
        return body(Matrix(a, m, k), Matrix(b, n, k));
      case Form::NN:
        return body(Matrix(a, m, k), transpose(Matrix(b, k, n)));
      case Form::NT:
        return body(transpose(Matrix(a, k, m)), transpose(Matrix(b, k, n)));
    }
  }

  template <class Body>
  void with_call(int set, const Body& body) const {
    with_factors(set, [&](const auto& a, const auto& b) {
      detail::with_program(operands_[static_cast<size_t>(set)].program(), [&](const detail::ProgramInfo& program) {
        body(detail::factor(a), detail::factor(b), program);
      });
    });
  }

  Gpu& gpu_;
  GpuCase product_;
  const std::vector<Factors>& factors_;
  std::vector<DeviceOperands<P>> operands_;
  DepthSlices slices_;
  DeviceMemory workspace_;
};

}  // namespace

double relative_error(const oracle::Grid<double>& got, const oracle::Grid<double>& wanted) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < wanted.values.size(); ++i) {
    const double gap = got.values[i] - wanted.values[i];
    apart += gap * gap;
    size += wanted.values[i] * wanted.values[i];
  }
  return size > 0 ? std::sqrt(apart / size) : std::sqrt(apart);
}

std::vector<Factors> make_factors(const GpuCase& product, RandomOperands& random) {
  const auto& [row, hidden, m, n, k, slices] = product;
  std::vector<Factors> sets;
  for (int set = 0; set < 2; ++set) {
    sets.push_back({DeviceMemory(m * k * 2), DeviceMemory(n * k * 2)});
    random.fill(sets.back().a.as<bf16>(), m * k, 1);
    random.fill(sets.back().b.as<bf16>(), n * k, 1 / std::sqrt(static_cast<double>(k)));
  }
  return sets;
}

std::unique_ptr<Subject> make_subject(Gpu& gpu, const GpuCase& product, const std::vector<Factors>& factors,
                                      RandomOperands& random) {
  using S = Tensors<bf16>;
  const auto make = [&]<class P>(std::type_identity<P> /*program*/) -> std::unique_ptr<Subject> {
    return std::make_unique<SubjectOf<P>>(gpu, product, factors, random);
  };
  switch (product.row->fused) {
    case Fused::store:
      return make(std::type_identity<Store<S>>{});
    case Fused::store_float:
      return make(std::type_identity<Store<S, float>>{});
    case Fused::accumulate:
      return make(std::type_identity<AccumulateInto<S>>{});
    case Fused::residual:
      return make(std::type_identity<Residual<S>>{});
    case Fused::residual_rms:
      return make(std::type_identity<Residual<S, GammaInEpilogue>>{});
    case Fused::swiglu:
      return make(std::type_identity<RmsNormSwiGlu<S, DropGateUp>>{});
    case Fused::swiglu_keep:
      return make(std::type_identity<RmsNormSwiGlu<S, KeepGateUp>>{});
    case Fused::rope:
      return make(std::type_identity<RmsNormRope<S>>{});
    case Fused::loss:
      return make(std::type_identity<CrossEntropy<S, RecomputeLogits>>{});
    case Fused::loss_keep:
      return make(std::type_identity<CrossEntropy<S, KeepLogits>>{});
    case Fused::swiglu_backward:
      return make(std::type_identity<SwiGluBackward<S>>{});
    case Fused::norm_backward:
      return make(std::type_identity<RmsNormBackward<S>>{});
    case Fused::softmax_gradient:
      return make(std::type_identity<CrossEntropyBackward<S, RecomputeLogits>>{});
  }
  throw Error("no program for this row");
}

}  // namespace coda::bench
