// What is measured: one fused product with its operands on the GPU.
#pragma once
#include <memory>
#include <vector>

#include "bench/gpu.h"
#include "coda/gpu.h"
#include "device.h"
#include "hopper/plan.h"
#include "oracle/oracle.h"

namespace coda::bench {

/// Factors of a product on the device, in the form's order.
struct Factors {
  DeviceMemory a, b;
};
/// Two sets of random ones, which make accumulators of variance 1.
std::vector<Factors> make_factors(const GpuCase& product, RandomOperands& random);

/// A product's accumulators in some of its rows, in double.
struct Reference {
  std::vector<int64_t> rows;
  oracle::Grid<double> acc;
};

/// The same product over two sets of operands, so that consecutive launches share nothing.
class Subject {
 public:
  virtual ~Subject() = default;
  /// coda::gemm, as a user calls it.
  virtual void launch(int set) = 0;
  /// By a plan, one of the candidates.
  virtual void launch(int set, const hopper::Plan& plan) = 0;
  /// Of the depth, that launch cuts it into.
  virtual int slices() const = 0;
  virtual const coda::detail::HopperKernels& kernels() const = 0;
  virtual hopper::Problem problem() const = 0;
  /// Runs the first set once, and holds every output in the reference's rows to float64.
  virtual std::vector<OutputError> errors(const Reference& reference) = 0;
};

/// factors: two sets, which stay as long as the subject. Takes gpu's workspace for itself.
std::unique_ptr<Subject> make_subject(Gpu& gpu, const GpuCase& product, const std::vector<Factors>& factors,
                                      RandomOperands& random);

/// ‖got − wanted‖ / ‖wanted‖.
double relative_error(const oracle::Grid<double>& got, const oracle::Grid<double>& wanted);

}  // namespace coda::bench
