// What `coda verify` does: calls of a program on every engine, judged; a row for each program and engine.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "verify/engine.h"
#include "verify/programs.h"
#include "verify/row.h"

namespace coda::verify {

/// M, N and K of a product; of a map N is its width and K is not used.
struct Size {
  int64_t m, n, k;
};
/// What is always tried: empty, single, around the widths of vectors, strips (24), slots (128), row blocks and depth blocks (256).
inline constexpr std::array kSizes = {Size{0, 40, 8},    Size{6, 0, 8},      Size{6, 48, 0},     Size{1, 1, 1},
                                      Size{3, 17, 5},    Size{7, 120, 33},   Size{64, 128, 256}, Size{65, 136, 257},
                                      Size{97, 272, 31}, Size{130, 400, 64}, Size{33, 16, 255},  Size{5, 8, 300},
                                      Size{1, 300, 9},   Size{193, 1, 70},   Size{64, 144, 513}};

/// The same on a GPU: around TMA's 8 columns, tiles of 64, 128 and 256, odd numbers of them for clusters of 2, depths of 64,
/// and one at which clusters wait for each other (coda/hopper/paced.h).
inline constexpr std::array kGpuSizes = {
    Size{0, 40, 8},     Size{6, 0, 8},       Size{6, 48, 0},       Size{1, 1, 1},      Size{1, 16, 8},
    Size{127, 128, 40}, Size{129, 144, 64},  Size{64, 256, 72},    Size{65, 272, 33},  Size{255, 264, 8},
    Size{257, 120, 96}, Size{384, 384, 128}, Size{128, 320, 1000}, Size{640, 96, 264}, Size{200, 1040, 136},
    Size{33, 1, 70},    Size{648, 520, 200}, Size{264, 264, 4168}};

/// Of a brief trial: tails of rows, columns and depth in several tiles, full tiles, and what TMA does not take.
inline constexpr std::array kBriefGpuSizes = {Size{200, 144, 72}, Size{256, 256, 128}, Size{264, 264, 4168},
                                              Size{33, 1, 70}};

/// Which calls are made.
struct Plan {
  uint64_t seed = 1;
  int rounds = 1;           // of random sizes and strides, after kSizes
  bool every_form = false;  // every form of a product at each size, not one at random
  bool products = true, maps = true;
};

/// Engines that take the same calls.
struct Device {
  std::vector<std::unique_ptr<Engine>> engines;
  std::span<const Size> sizes;
  Arithmetic arithmetic;
  bool gpu;  // bf16 factors, in the forms that the program has kernels for
};
/// An engine for each instruction set.
Device cpu_device();
/// The GPU engine on the current device. Throws UsageError that says what is missing: the GPU half, or a GPU that it runs on.
Device gpu_device(Extent extent = Extent::full);

/// The rows of a program, oracle and repetition, for each engine. Stops at the first fault. No rows for a program without kernels
/// for the GPU.
std::vector<Row> verify(const Program& program, const Plan& plan, const Device& device);
/// On the CPU.
std::vector<Row> verify(const Program& program, const Plan& plan);

using cpu::instruction_sets;
/// "cpu avx2".
std::string engine_name(cpu::Isa isa);

/// A pool of this many threads, made once.
Cpu& pool(int threads);
inline constexpr std::array kThreads = {2, 3, 5};

/// For as long as it lives, the CPU engine runs on this instruction set.
class Chosen {
 public:
  explicit Chosen(cpu::Isa isa) : before_(cpu::chosen_isa()) { cpu::choose_isa(isa); }
  ~Chosen() { cpu::choose_isa(before_); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;

 private:
  cpu::Isa before_;
};

}  // namespace coda::verify
