// Everything that the front door refuses: a typed exception that names the operand, what it is and what it needs, and nothing
// written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "coda/gemm.h"
#include "coda/programs/cross_entropy.h"
#include "coda/programs/norm.h"
#include "coda/programs/rope.h"
#include "coda/programs/store.h"
#include "coda/programs/swiglu.h"
#include "refused.h"

namespace coda {
namespace {

constexpr int64_t kM = 6, kN = 32, kK = 8;
constexpr int64_t kTooMany = int64_t{1} << 31;

/// Memory for any operand of these tests; NaN until something writes it.
template <class T>
std::vector<T> poisoned() {
  std::vector<T> memory(4096);
  std::memset(static_cast<void*>(memory.data()), 0xff, memory.size() * sizeof(T));
  return memory;
}

class FrontDoor : public testing::Test {
 protected:
  /// call() must throw E about this operand, and leave all outputs as they were.
  template <class E = OperandError, class Call>
  void refused(const Call& call, const std::string& operand, const std::string& got, const std::string& needs) {
    test::expect_refused<E>(call, operand, got, needs);
    expect_nothing_written();
  }
  void expect_nothing_written() const {
    for (const auto* memory : {&out, &more, &sums})
      for (float x : *memory)
        if (!std::isnan(x)) {
          ADD_FAILURE() << "an output was written";
          return;
        }
    for (bf16 x : half)
      if (!std::isnan(float(x))) {
        ADD_FAILURE() << "a bf16 output was written";
        return;
      }
  }

  Cpu cpu{1};
  std::vector<float> a_memory = std::vector<float>(4096, 1), b_memory = std::vector<float>(4096, 1);
  std::vector<int32_t> ints = std::vector<int32_t>(4096, 1);
  std::vector<float> in = std::vector<float>(4096, 1);
  std::vector<bf16> in_half = std::vector<bf16>(4096, bf16(1.f));
  std::vector<float> out = poisoned<float>(), more = poisoned<float>(), sums = poisoned<float>();
  std::vector<bf16> half = poisoned<bf16>();

  Matrix<const float> a{a_memory.data(), kM, kK};
  Matrix<const float> b{b_memory.data(), kN, kK};
  Matrix<float> c{out.data(), kM, kN};
  Store<Tensors<float>> store{.out = c};
  Residual<Tensors<float>> residual{.residual = {in.data(), kM, kN}, .h = c, .sum_sq = {sums.data(), 1, kM}};
};

TEST_F(FrontDoor, TakesWhatFits) {
  gemm(cpu, a, b, store);
  EXPECT_EQ(c(kM - 1, kN - 1), kK);
  gemm(cpu, a, b, residual);
  EXPECT_EQ(c(0, 0), kK + 1);
  EXPECT_EQ(sums[0], kN * (kK + 1) * (kK + 1));
}

// ---- the factors

TEST_F(FrontDoor, InnerSizes) {
  refused([&] { gemm(cpu, a, Matrix<const float>(b_memory.data(), kN, 7), store); }, "b", "[N, K] = 32x7",
          "the K = 8 of a");
  // Stored the other way, [K, N].
  refused([&] { gemm(cpu, a, transpose(Matrix<const float>(b_memory.data(), 7, kN)), store); }, "b", "[N, K] = 32x7",
          "the K = 8 of a");
  refused([&] { gemm(cpu, transpose(a), b, store); }, "b", "[N, K] = 32x8", "the K = 6 of a");
}

TEST_F(FrontDoor, FactorsWithoutMemory) {
  refused([&] { gemm(cpu, Matrix<const float>(nullptr, kM, kK), b, store); }, "a", "null", "memory for 6x8 elements");
  refused([&] { gemm(cpu, a, transpose(Matrix<const float>(nullptr, kK, kN)), store); }, "b", "null",
          "memory for 8x32 elements");
  refused([&] { map(cpu, Matrix<const float>(nullptr, kM, kN), store); }, "x", "null", "memory for 6x32 elements");
}

TEST_F(FrontDoor, Strides) {
  refused([&] { gemm(cpu, Matrix<const float>(a_memory.data(), kM, kK, 7), b, store); }, "a", "of stride 7",
          "at least its 8 columns");
  refused([&] { gemm(cpu, a, Matrix<const float>(b_memory.data(), kN, kK, -8), store); }, "b", "of stride -8",
          "at least its 8 columns");
  store.out.stride = kN - 1;
  refused([&] { gemm(cpu, a, b, store); }, "out", "of stride 31", "at least its 32 columns");
  store.out.stride = std::numeric_limits<int64_t>::max() / 8;
  refused([&] { gemm(cpu, a, b, store); }, "out", "of 6 rows with stride 1152921504606846975",
          "a size below 2^63 bytes");
}

TEST_F(FrontDoor, TheStrideOfOneRowDoesNotMatter) {
  store.out = {out.data(), 1, kN, 0};
  gemm(cpu, Matrix<const float>(a_memory.data(), 1, kK, 0), b, store);
  EXPECT_EQ(out[kN - 1], kK);
  EXPECT_TRUE(std::isnan(out[kN]));
}

TEST_F(FrontDoor, Sizes) {
  refused([&] { gemm(cpu, Matrix<const float>(a_memory.data(), -1, kK), b, store); }, "a", "of shape -1x8",
          "sizes of 0 or more");
  refused([&] { gemm(cpu, a, Matrix<const float>(b_memory.data(), kN, -3), store); }, "b", "of shape 32x-3",
          "sizes of 0 or more");
  refused([&] { gemm(cpu, Matrix<const float>(a_memory.data(), kTooMany, kK), b, store); }, "a",
          "of shape 2147483648x8", "at most 2147483647 rows and columns");
  refused([&] { map(cpu, Matrix<const float>(a_memory.data(), 1, kTooMany), store); }, "x", "of shape 1x2147483648",
          "at most 2147483647 rows and columns");
  residual.sum_sq.rows = -1;
  refused([&] { gemm(cpu, a, b, residual); }, "sum_sq", "of shape -1x6", "sizes of 0 or more");
}

TEST_F(FrontDoor, Alignment) {
  const auto* byte = reinterpret_cast<const std::byte*>(a_memory.data());
  const auto refuses = [&](const auto& call, const std::string& operand, const std::string& needs) {
    try {
      call();
      ADD_FAILURE() << operand << " was accepted";
    } catch (const OperandError& e) {
      EXPECT_EQ(e.operand(), operand);
      EXPECT_EQ(e.got().rfind("at address 0x", 0), 0U) << e.got();
      EXPECT_EQ(e.needs(), needs);
    }
    expect_nothing_written();
  };
  refuses([&] { gemm(cpu, Matrix(reinterpret_cast<const float*>(byte + 2), kM, kK), b, store); }, "a",
          "an address that is a multiple of 4");
  refuses([&] { gemm(cpu, Matrix(reinterpret_cast<const bf16*>(byte + 1), kM, kK), b, store); }, "a",
          "an address that is a multiple of 2");
  store.out.data = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(out.data()) + 1);
  refuses([&] { gemm(cpu, a, b, store); }, "out", "an address that is a multiple of 4");
}

// ---- the operands, kind by kind

TEST_F(FrontDoor, Tiles) {
  refused([&] { gemm(cpu, a, b, Store<Tensors<float>>{}); }, "out", "0x0", "6x32 ([M, N])");
  store.out = {out.data(), kM, kN - 1};
  refused([&] { gemm(cpu, a, b, store); }, "out", "6x31", "6x32 ([M, N])");
  store.out = {out.data(), kM + 1, kN};
  refused([&] { gemm(cpu, a, b, store); }, "out", "7x32", "6x32 ([M, N])");
  store.out = {nullptr, kM, kN};
  refused([&] { gemm(cpu, a, b, store); }, "out", "null", "memory for 6x32 elements");
  residual.residual.rows = kM - 1;
  refused([&] { gemm(cpu, a, b, residual); }, "residual", "5x32", "6x32 ([M, N])");
  refused(
      [&] {
        gemm(cpu, a, b, AccumulateInto<Tensors<float>>{.out = {out.data(), kN, kM}});
      },
      "out", "32x6", "6x32 ([M, N])");
}

TEST_F(FrontDoor, HalfAndDoubleTiles) {
  RmsNormSwiGlu<Tensors<float>> forward{.inv_rms = {in.data(), kM}, .gate_up = c, .y = {more.data(), kM, kN}};
  refused([&] { gemm(cpu, a, b, forward); }, "y", "6x32", "6x16 ([M, N/2])");
  SwiGluBackward<Tensors<float>> backward{.inv_rms = {in.data(), kM},
                                          .gate_up = {in.data(), kM, kN},
                                          .d_gate_up = {out.data(), kM, 2 * kN},
                                          .y = {more.data(), kM, kN},
                                          .dot_z = {sums.data(), 1, kM}};
  refused([&] { gemm(cpu, a, b, backward); }, "gate_up", "6x32", "6x64 ([M, 2N])");
}

TEST_F(FrontDoor, Vectors) {
  RmsNorm<Tensors<float>> norm{.inv_rms = {in.data(), kM - 1}, .y = c};
  refused([&] { gemm(cpu, a, b, norm); }, "inv_rms", "5 values", "6 ([M])");
  norm.inv_rms = {nullptr, kM};
  refused([&] { gemm(cpu, a, b, norm); }, "inv_rms", "null", "memory for 1x6 elements");
  Residual<Tensors<float>, GammaInEpilogue> scaled{.residual = {in.data(), kM, kN},
                                                   .gamma = {in.data(), kM},
                                                   .h = c,
                                                   .x = {more.data(), kM, kN},
                                                   .sum_sq = {sums.data(), 1, kM}};
  refused([&] { gemm(cpu, a, b, scaled); }, "gamma", "6 values", "32 ([N])");
}

TEST_F(FrontDoor, Periods) {
  RmsNormRope<Tensors<float>> rope{.inv_rms = {in.data(), kM},
                                   .position = {ints.data(), kM},
                                   .turns_high = {in.data(), 16},
                                   .turns_low = {in.data(), 16},
                                   .qkv = c};
  for (int64_t period : {0, 4, 12, 32}) {
    rope.turns_low = {in.data(), period};
    refused([&] { gemm(cpu, a, b, rope); }, "turns_low", std::to_string(period) + " values",
            "a multiple of 8 that divides the 16 pairs of a row");
  }
  rope.turns_low = {in.data(), 8};
  EXPECT_NO_THROW(gemm(cpu, a, b, rope));
}

TEST_F(FrontDoor, WidthsOfPairs) {
  const Matrix<const float> narrow(b_memory.data(), 24, kK);
  RmsNormSwiGlu<Tensors<float>> forward{
      .inv_rms = {in.data(), kM}, .gate_up = {out.data(), kM, 24}, .y = {more.data(), kM, 12}};
  refused([&] { gemm(cpu, a, narrow, forward); }, "b", "24 wide",
          "a multiple of 16, since the program takes pairs in blocks of 8 and 8 columns");
  refused([&] { map(cpu, Matrix<const float>(in.data(), kM, 24), forward); }, "x", "24 wide",
          "a multiple of 16, since the program takes pairs in blocks of 8 and 8 columns");
  SwiGluBackward<Tensors<float>> backward{.inv_rms = {in.data(), kM},
                                          .gate_up = {in.data(), kM, 24},
                                          .d_gate_up = {out.data(), kM, 24},
                                          .y = {more.data(), kM, 12},
                                          .dot_z = {sums.data(), 1, kM}};
  refused([&] { gemm(cpu, a, Matrix<const float>(b_memory.data(), 12, kK), backward); }, "b", "12 wide",
          "a multiple of 8, since gate_up holds pairs in blocks of 8 and 8 columns");
}

TEST_F(FrontDoor, Slots) {
  residual.sum_sq = {sums.data(), kM, 1};
  refused([&] { gemm(cpu, a, b, residual); }, "sum_sq", "6x1", "1x6 ([slots, M], a slot for every 128)");
  const Matrix<const float> wide(b_memory.data(), 129, kK);
  residual = {.residual = {in.data(), kM, 129}, .h = {out.data(), kM, 129}, .sum_sq = {sums.data(), 1, kM}};
  refused([&] { gemm(cpu, a, wide, residual); }, "sum_sq", "1x6", "2x6 ([slots, M], a slot for every 128)");
  RmsNormBackward<Tensors<float>, StreamEnds, GammaInEpilogue> backward{.inv_rms = {in.data(), kM},
                                                                        .mean_dot = {in.data(), kM},
                                                                        .h = {in.data(), kM, kN},
                                                                        .gamma = {in.data(), kN},
                                                                        .d_h = c,
                                                                        .d_gamma = {more.data(), kM, kN}};
  refused([&] { gemm(cpu, a, b, backward); }, "d_gamma", "6x32", "1x32 ([slots, N], a slot for every 64)");
  std::vector<MaxSum> slots(kM * 2);
  CrossEntropy<Tensors<float>, RecomputeLogits> loss{.inv_rms = {in.data(), kM},
                                                     .label = {ints.data(), kM},
                                                     .log_sum_exp = {slots.data(), 2, kM},
                                                     .label_logit = {sums.data(), 1, kM}};
  refused([&] { gemm(cpu, a, b, loss); }, "log_sum_exp", "2x6", "1x6 ([slots, M], a slot for every 128)");
}

TEST_F(FrontDoor, EmptyProblemsAreStillChecked) {
  store.out = {nullptr, 0, kN + 1};
  refused([&] { gemm(cpu, Matrix<const float>(nullptr, 0, kK), b, store); }, "out", "0x33", "0x32 ([M, N])");
  store.out = {nullptr, 0, kN};
  EXPECT_NO_THROW(gemm(cpu, Matrix<const float>(nullptr, 0, kK), b, store));
  store.out = {nullptr, kM, 0};
  EXPECT_NO_THROW(gemm(cpu, a, Matrix<const float>(nullptr, 0, kK), store));
}

// ---- shared memory

TEST_F(FrontDoor, AnOutputOnAFactor) {
  const std::string needs = "memory of its own, or exactly the tensor of an input tile";
  // The second half of a is in the way of c's first row.
  refused<OverlapError>([&] { gemm(cpu, Matrix<const float>(out.data() + kN - 1, kM, kK), b, store); }, "out",
                        "an output that shares memory with a", needs);
  refused<OverlapError>([&] { gemm(cpu, a, Matrix<const float>(out.data(), kN, kK), store); }, "out",
                        "an output that shares memory with b", needs);
  // A factor is read many times: not even exactly the same tensor will do.
  const Matrix<const float> square(in.data(), 16, 16);
  refused<OverlapError>(
      [&] {
        gemm(cpu, Matrix<const float>(out.data(), 16, 16), square, Store<Tensors<float>>{.out = {out.data(), 16, 16}});
      },
      "out", "an output that shares memory with a", needs);
}

TEST_F(FrontDoor, AnOutputOnAnother) {
  residual.sum_sq = {out.data() + kM * kN - 1, 1, kM};  // c's last element
  refused<OverlapError>([&] { gemm(cpu, a, b, residual); }, "sum_sq", "an output that shares memory with h",
                        "memory of its own, or exactly the tensor of an input tile");
  Residual<Tensors<float>, GammaInEpilogue> twice{
      .residual = {in.data(), kM, kN}, .gamma = {in.data(), kN}, .h = c, .x = c, .sum_sq = {sums.data(), 1, kM}};
  refused<OverlapError>([&] { gemm(cpu, a, b, twice); }, "x", "an output that shares memory with h",
                        "memory of its own, or exactly the tensor of an input tile");
}

TEST_F(FrontDoor, AnOutputAcrossAnInput) {
  const std::string needs = "memory of its own, or exactly the tensor of an input tile";
  residual.residual = {out.data() + kN, kM, kN};  // one row further on
  refused<OverlapError>([&] { gemm(cpu, a, b, residual); }, "h", "an output that shares memory with residual", needs);
  residual.residual = {out.data(), kM, kN, kN + 1};  // the same beginning, other rows
  refused<OverlapError>([&] { gemm(cpu, a, b, residual); }, "h", "an output that shares memory with residual", needs);
  residual.residual = {out.data() + 16, kM, kN, 64};  // of a wider matrix, columns that meet h's
  residual.h = {out.data(), kM, kN, 64};
  refused<OverlapError>([&] { gemm(cpu, a, b, residual); }, "h", "an output that shares memory with residual", needs);
  RmsNorm<Tensors<float>> norm{.inv_rms = {out.data(), kM}, .y = c};  // a vector is no tile
  refused<OverlapError>([&] { gemm(cpu, a, b, norm); }, "y", "an output that shares memory with inv_rms", needs);
  // Pairs of bf16 beside single values of half their width: the same bytes, not the same elements.
  refused<OverlapError>(
      [&] {
        gemm(cpu, a, b,
             SwiGluBackward<Tensors<bf16>>{.inv_rms = {in.data(), kM},
                                           .gate_up = {half.data(), kM, 2 * kN},
                                           .d_gate_up = {half.data() + 1024, kM, 2 * kN},
                                           .y = {half.data(), kM, kN, 2 * kN},
                                           .dot_z = {sums.data(), 1, kM}});
      },
      "y", "an output that shares memory with gate_up", needs);
}

TEST_F(FrontDoor, ExactlyTheTensorOfAnInputTileIsInPlace) {
  std::vector<float> stream(kM * kN, 2);
  residual.residual = {stream.data(), kM, kN};
  residual.h = {stream.data(), kM, kN};
  gemm(cpu, a, b, residual);
  for (float x : stream) EXPECT_EQ(x, kK + 2);
  EXPECT_EQ(sums[kM - 1], kN * (kK + 2) * (kK + 2));
}

TEST_F(FrontDoor, DisjointColumnsOfOneMatrixAreNoOverlap) {
  const Matrix<float> wide(out.data(), kM, 3 * kN);
  Residual<Tensors<float>, GammaInEpilogue> program{.residual = {in.data(), kM, kN},
                                                    .gamma = {in.data(), kN},
                                                    .h = wide.col_range(0, kN),
                                                    .x = wide.col_range(2 * kN, kN),
                                                    .sum_sq = {sums.data(), 1, kM}};
  gemm(cpu, a, b, program);
  for (int64_t i = 0; i < kM; ++i)
    for (int64_t j = 0; j < 3 * kN; ++j) {
      if (j / kN == 1)
        EXPECT_TRUE(std::isnan(wide(i, j))) << i << ", " << j;
      else
        EXPECT_EQ(wide(i, j), kK + 1) << i << ", " << j;
    }
}

TEST_F(FrontDoor, RowsBelowEachOtherAreNoOverlap) {
  const Matrix<float> tall(out.data(), 2 * kM, kN);
  Residual<Tensors<float>, GammaInEpilogue> program{.residual = {in.data(), kM, kN},
                                                    .gamma = {in.data(), kN},
                                                    .h = tall.row_range(kM, kM),
                                                    .x = tall.row_range(0, kM),
                                                    .sum_sq = {sums.data(), 1, kM}};
  EXPECT_NO_THROW(gemm(cpu, a, b, program));
}

TEST_F(FrontDoor, ThreadsBelowZero) {
  EXPECT_THROW(Cpu(-1), UsageError);
}

}  // namespace
}  // namespace coda
