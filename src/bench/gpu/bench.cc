#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "bench/gpu.h"
#include "bench/sampled_product.h"
#include "cublas.h"
#include "device.h"
#include "each_case.h"
#include "nvml.h"
#include "race.h"
#include "stopwatch.h"
#include "subject.h"

namespace coda::bench {

namespace {

constexpr int kSets = 2;
constexpr int64_t kSamples = 8;
// Above the error of any output in bf16, and far below that of a wrong one.
constexpr double kWrong = 2e-2;
constexpr double kSelection =
    0.015;  // seconds of launches between two events, at least, to choose of cublasLt's suggestions
constexpr int kSelectionRounds = 3;

std::vector<int64_t> sampled_rows(int64_t m, std::mt19937_64& random) {
  std::vector<int64_t> rows = {0, m - 1};
  std::uniform_int_distribution<int64_t> row(0, m - 1);
  while (static_cast<int64_t>(rows.size()) < std::min(kSamples, m)) rows.push_back(row(random));
  return rows;
}

/// Everything that is measured of one case, and its memory.
class CaseBench {
 public:
  CaseBench(const GpuOptions& options, const GpuCase& product, Gpu& gpu, Cpu& cpu, const Cublas& cublas,
            Stopwatch& stopwatch, RandomOperands& random)
      : options_(options),
        cpu_(cpu),
        cublas_(cublas),
        stopwatch_(stopwatch),
        random_(random),
        factors_(make_factors(product, random)) {
    result_.product = product;
    const auto& [row, hidden, m, n, k, slices] = product;
    const bool fp32 = row->fused == Fused::store_float || row->fused == Fused::accumulate;
    for (int set = 0; set < kSets; ++set) {
      outs_.emplace_back(m * n * (fp32 ? 4 : 2));
      const Factors& factors = factors_[static_cast<size_t>(set)];
      products_[static_cast<size_t>(set)] = {.form = row->form,
                                             .m = m,
                                             .n = n,
                                             .k = k,
                                             .fp32 = fp32,
                                             .beta = row->fused == Fused::accumulate ? 1.F : 0.F,
                                             .a = factors.a.as<bf16>(),
                                             .b = factors.b.as<bf16>(),
                                             .out = outs_.back().as<void>()};
    }
    subject_ = make_subject(gpu, product, factors_, random);
    result_.product.slices = subject_->slices();
    suggestions_.emplace(cublas, products_[0]);
  }

  GpuResult run() && {
    const Reference reference = make_reference();
    const Launch coda = [this](int set) { subject_->launch(set); };
    result_.errors = subject_->errors(reference);
    for (const OutputError& error : result_.errors)
      if (!(error.coda <= kWrong))
        result_.failure = fmt::format("{} differs from float64 by {:.2g}", error.name, error.coda);
    if (!result_.failure.empty()) return std::move(result_);

    // What PyTorch would take for the same output: the weight gradients' are fp32, which it takes from cublasLt.
    const Launch standard =
        products_[0].fp32 ? suggestion(0) : Launch([this](int set) { cublas_(products_[static_cast<size_t>(set)]); });
    check_product(standard, "cuBLAS", reference);
    check_cuda(cudaDeviceSynchronize(), "the checks");
    warm_up({{"coda", coda}, {"cublas", standard}}, options_.warm_seconds);
    result_.suggestions = suggestions_->count();
    result_.best_suggestion = fastest_suggestion();
    const Launch best = suggestion(result_.best_suggestion);
    check_product(best, "cublasLt", reference);

    const std::vector<Contestant> contestants = {{"coda", coda}, {"cublas", standard}, {"cublaslt_fastest", best}};
    warm_up(contestants, std::min(options_.warm_seconds, 0.5));  // the last check let the card rest
    result_.sustained = settled_race(stopwatch_, contestants, standard, options_.rounds, random_.generator());
    result_.cool = race(contestants, options_.cool_rounds, random_.generator(),
                        [&](const Launch& launch, int round) { return stopwatch_.alone(launch, round % kSets); });
    return std::move(result_);
  }

 private:
  Launch suggestion(int number) {
    return [this, number](int set) { suggestions_->run(number, products_[static_cast<size_t>(set)]); };
  }

  Reference make_reference() {
    const auto& [row, hidden, m, n, k, slices] = result_.product;
    const DeviceProduct& p = products_[0];
    Reference reference{.rows = sampled_rows(m, random_.generator()), .acc = {}};
    const auto samples = static_cast<int64_t>(reference.rows.size());
    oracle::Grid<double> a(samples, k);
    if (row->form == Form::NT) {
      const std::vector<bf16> columns = download_columns(Matrix(p.a, k, m), reference.rows);
      for (int64_t i = 0; i < samples; ++i)
        for (int64_t j = 0; j < k; ++j) a(i, j) = static_cast<double>(columns[static_cast<size_t>(j * samples + i)]);
    } else {
      const std::vector<bf16> rows = download_rows(Matrix(p.a, m, k), reference.rows);
      std::ranges::transform(rows, a.values.begin(), [](bf16 x) { return static_cast<double>(x); });
    }
    const bool transposed = row->form != Form::TN;
    const auto b = std::make_unique_for_overwrite<bf16[]>(static_cast<size_t>(n * k));
    check_cuda(cudaMemcpy(b.get(), p.b, static_cast<size_t>(n * k) * sizeof(bf16), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    reference.acc = sampled_product(cpu_, a, {b.get(), transposed ? k : n, transposed ? n : k}, transposed);
    return reference;
  }

  /// A library's product that is not the reference's would be another race. Leaves zeros in what is added to.
  void check_product(const Launch& launch, const char* name, const Reference& reference) const {
    const DeviceProduct& p = products_[0];
    const auto bytes = static_cast<size_t>(outs_[0].bytes());
    // Where the product is added, to zeros.
    check_cuda(cudaMemset(p.out, p.beta == 0 ? 0xff : 0, bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaMemset");
    launch(0);
    check_cuda(cudaDeviceSynchronize(), name);
    oracle::Grid<double> got(reference.acc.rows, reference.acc.cols);
    const auto take = [&](const auto* out) {
      const auto values = download_rows(Matrix(out, p.m, p.n), reference.rows);
      std::ranges::transform(values, got.values.begin(), [](auto x) { return static_cast<double>(x); });
    };
    if (p.fp32)
      take(static_cast<const float*>(p.out));
    else
      take(static_cast<const bf16*>(p.out));
    const double error = relative_error(got, reference.acc);
    if (!(error <= kWrong)) throw Error(fmt::format("{}'s product differs from float64 by {:.2g}", name, error));
  }

  void warm_up(const std::vector<Contestant>& contestants, double seconds) {
    warm(stopwatch_, contestants, launches_of(stopwatch_, contestants.back().launch, kSelection), seconds);
  }

  int fastest_suggestion() {
    std::vector<std::vector<double>> seconds(static_cast<size_t>(suggestions_->count()));
    std::vector<int> order(seconds.size());
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < kSelectionRounds; ++round) {
      std::ranges::shuffle(order, random_.generator());
      for (const int i : order)
        seconds[static_cast<size_t>(i)].push_back(stopwatch_.back_to_back(suggestion(i), kSets).seconds);
    }
    const auto fastest = std::ranges::min_element(seconds, {}, [](const auto& s) { return median(s); });
    return static_cast<int>(fastest - seconds.begin());
  }

  const GpuOptions& options_;
  Cpu& cpu_;
  const Cublas& cublas_;
  Stopwatch& stopwatch_;
  RandomOperands& random_;
  GpuResult result_;
  std::vector<Factors> factors_;
  std::vector<DeviceMemory> outs_;
  std::array<DeviceProduct, kSets> products_{};
  std::unique_ptr<Subject> subject_;
  std::optional<Cublas::Suggestions> suggestions_;
};

GpuMachine machine_of(const Gpu& gpu, const Nvml& nvml, const Cublas& cublas) {
  int runtime = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return {.gpu = gpu.name(),
          .driver = nvml.driver(),
          .cuda = fmt::format("{}.{}", runtime / 1000, runtime % 1000 / 10),
          .cublas = cublas.version(),
          .nvml = nvml.trouble(),
          .power_limit_watts = nvml.power_limit_watts(),
          .top_mhz = nvml.top_mhz()};
}

}  // namespace

GpuReport bench_gpu(const GpuOptions& options, const std::function<void(const GpuReport&)>& progress) {
  const std::vector<GpuCase> cases = gpu_cases(options);
  { const Gpu usable; }  // says what is wrong with the GPU before anything else does
  const Stream stream;
  Gpu gpu(stream.get());
  const Nvml nvml(gpu.device());
  const Cublas cublas(stream);
  Cpu cpu;
  Stopwatch stopwatch(stream, nvml);
  RandomOperands random;
  GpuReport report{.machine = machine_of(gpu, nvml, cublas), .options = options, .results = {}};
  for_each_case(cases, report, progress, [&](const GpuCase& product) {
    return CaseBench(options, product, gpu, cpu, cublas, stopwatch, random).run();
  });
  return report;
}

}  // namespace coda::bench
