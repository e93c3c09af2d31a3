// The GPU engine under verification: every operand mirrored in device memory, with its guards and its poison.
#include "verify/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "coda/gpu.h"
#include "hopper/device_memory.h"
#include "hopper/plan.h"
#include "hopper/product.h"
#include "hopper/sliced_product.h"

namespace coda::verify {

namespace {

using coda::detail::HopperKernel;
using coda::detail::HopperKernels;
using coda::detail::HopperTile;
using hopper::DeviceMemory;

constexpr int kRuns = 20;
constexpr DepthSlices kSlices{3};
constexpr std::byte kPoison{0xff};

/// A case's memory on the device. Addresses there are aligned as they are here.
class Mirror {
 public:
  explicit Mirror(AnyCase& c) : storages_(c.storages()) {
    for (Storage& s : storages_) {
      memory_.emplace_back(static_cast<int64_t>(s.bytes().size()));
      memory_.back().copy_from(s.bytes().data());
    }
  }
  const void* placed(const void* address) const {
    const auto* host = static_cast<const std::byte*>(address);
    for (size_t i = 0; i < storages_.size(); ++i) {
      const auto& bytes = storages_[i].bytes();
      if (host >= bytes.data() && host < bytes.data() + bytes.size()) return memory_[i].data() + (host - bytes.data());
    }
    throw Error("an operand has memory that its case did not make");
  }
  void copy_back() {
    for (size_t i = 0; i < storages_.size(); ++i) memory_[i].copy_to(storages_[i].writable_bytes().data());
  }

 private:
  std::deque<Storage>& storages_;
  std::vector<DeviceMemory> memory_;
};

/// What gemm_workspace asked for, and guards behind it.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), memory_(bytes + kGuard) { memory_.fill(kPoison); }
  void* data() { return memory_.data(); }
  void check() const {
    std::vector<std::byte> all(static_cast<size_t>(memory_.bytes()));
    memory_.copy_to(all.data());
    const auto guard = all.begin() + static_cast<std::ptrdiff_t>(bytes_);
    const auto written = std::find_if(guard, all.end(), [](std::byte b) { return b != kPoison; });
    if (written != all.end())
      throw Error(fmt::format("the workspace of {} bytes was written at byte {}", bytes_, written - all.begin()));
  }

 private:
  static constexpr int64_t kGuard = 256;
  int64_t bytes_;
  DeviceMemory memory_;
};

class HopperEngine : public Engine {
 public:
  explicit HopperEngine(Extent extent) : extent_(extent) {}
  std::string name() const override { return "hopper"; }

  std::vector<Way> ways(AnyCase& c) override {
    std::vector<Way> all;
    c.with_call([](const void* address) { return address; },
                [&](const Call& call) {
                  if (call.is_map || !c.aligned()) return;
                  for (const HopperKernel& kernel : call.hopper->products)
                    if (kernel.form == hopper::form_of(call.a, call.b))
                      all.push_back({fmt::format("by {} tiles", hopper::name(kernel.tile)),
                                     [this, tile = kernel.tile](AnyCase& it) { run(it, tile); }});
                });
    if (all.empty()) all.push_back(any("by its own choice"));
    c.with_call([](const void* address) { return address; },
                [&](const Call& call) {
                  if (!call.is_map && hopper::stages_of(call.a.depth) > 1)
                    all.push_back({fmt::format("in {} slices of its depth", kSlices.count),
                                   [this](AnyCase& it) { run(it, {}, {}, kSlices); }, true});
                });
    return all;
  }
  std::vector<Way> again(AnyCase& c, Random& /*random*/) override {
    if (extent_ == Extent::brief) return {any("again")};
    std::vector<Way> all(kRuns - 1, any("again"));
    c.with_call([](const void* address) { return address; },
                [&](const Call& call) {
                  // Not what runs in two passes.
                  if (call.is_map || call.a.rows == 0 || call.b.rows == 0 || call.a.depth == 0 ||
                      hopper::choose(call.a, call.b, call.program, *call.hopper).kernel == nullptr)
                    return;
                  for (const hopper::Candidate& candidate : hopper::candidates(
                           hopper::problem_of(call.a, call.b, call.program, gpu_.multiprocessors()), *call.hopper))
                    all.push_back({"by " + hopper::text_of(candidate.kernel->tile, candidate.band),
                                   [this, plan = hopper::Plan{.kernel = candidate.kernel, .band = candidate.band}](
                                       AnyCase& it) { run(it, {}, plan); }});
                });
    return all;
  }

 private:
  /// As the engine itself chooses.
  Way any(const char* name) {
    return {name, [this](AnyCase& c) { run(c, {}); }};
  }

  void run(AnyCase& c, std::optional<HopperTile> tile, const hopper::Plan& plan = {}, DepthSlices slices = {}) {
    c.reset();
    Mirror mirror(c);
    std::optional<Workspace> workspace;
    c.with_call([&](const void* address) { return mirror.placed(address); },
                [&](const Call& call) {
                  HopperKernels kernels = *call.hopper;
                  std::vector<HopperKernel> chosen;
                  if (tile) {
                    std::ranges::copy_if(kernels.products, std::back_inserter(chosen),
                                         [&](const HopperKernel& k) { return k.tile == *tile; });
                    kernels.products = chosen;
                  }
                  if (plan.kernel != nullptr) {
                    hopper::run_fused(gpu_, call.a, call.b, call.program, plan);
                  } else if (call.is_map) {
                    coda::detail::run_map(gpu_, call.a, call.program, kernels);
                  } else {
                    const int64_t bytes =
                        coda::detail::product_workspace(call.a, call.b, call.program, kernels, slices);
                    workspace.emplace(bytes);
                    gpu_.set_workspace(bytes > 0 ? workspace->data() : nullptr, bytes);
                    coda::detail::run_product(gpu_, call.a, call.b, call.program, kernels, slices);
                  }
                });
    hopper::synchronize();
    mirror.copy_back();
    if (workspace) workspace->check();
  }

  Extent extent_;
  Gpu gpu_;
};

}  // namespace

std::unique_ptr<Engine> gpu_engine(Extent extent) {
  return std::make_unique<HopperEngine>(extent);
}

}  // namespace coda::verify
