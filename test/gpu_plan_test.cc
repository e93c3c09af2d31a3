// How the GPU engine would run a call, and what it refuses: without a GPU, on addresses that nobody reads.
#include "hopper/plan.h"

#include <gtest/gtest.h>

#include <tuple>
#include <utility>

#include "coda/programs/norm.h"
#include "coda/programs/store.h"
#include "refused.h"

namespace coda {
namespace {

using coda::detail::Factor;
using coda::detail::Form;
using coda::detail::HopperKernel;
using coda::detail::HopperKernels;
using coda::detail::HopperTile;
using coda::detail::ProgramInfo;

alignas(256) bf16 memory[4096];

Matrix<bf16> matrix(int64_t rows, int64_t cols, int64_t stride, int64_t offset = 0) {
  return {memory + offset, rows, cols, stride};
}

const HopperKernel kKernels[] = {{Form::TN, HopperTile::pingpong_128x128, nullptr},
                                 {Form::NN, HopperTile::cooperative_128x128, nullptr}};
const HopperKernels kBoth{kKernels, nullptr};

template <class P>
hopper::Plan plan_of(const Factor& a, const Factor& b, const P& program, const HopperKernels& kernels = kBoth) {
  hopper::Plan plan;
  coda::detail::with_program(program, [&](const ProgramInfo& info) { plan = hopper::choose(a, b, info, kernels); });
  return plan;
}

class GpuPlan : public ::testing::Test {
 protected:
  Matrix<bf16> x = matrix(16, 64, 64), w = matrix(32, 64, 64), out = matrix(16, 32, 32);
  Factor a = coda::detail::factor(x), b = coda::detail::factor(w);
};

TEST_F(GpuPlan, TakesTheKernelOfTheForm) {
  const auto tn = plan_of(a, b, Store<>{.out = out});
  EXPECT_EQ(tn.kernel, &kKernels[0]);
  EXPECT_EQ(tn.reason, "");
  const Factor w_stored_otherwise = coda::detail::factor(transpose(matrix(64, 32, 32)));
  EXPECT_EQ(plan_of(a, w_stored_otherwise, Store<>{.out = out}).kernel, &kKernels[1]);
}

const HopperKernel kTwoTiles[] = {
    {Form::TN, HopperTile::pingpong_128x128, nullptr}, {Form::TN, HopperTile::cooperative_128x256, nullptr},
    {Form::NN, HopperTile::pingpong_128x128, nullptr}, {Form::NN, HopperTile::cooperative_128x256, nullptr},
    {Form::NT, HopperTile::pingpong_128x128, nullptr}, {Form::NT, HopperTile::cooperative_128x256, nullptr}};
const HopperKernels kTwo{kTwoTiles, nullptr};

hopper::Problem product(Form form, int64_t m, int64_t n, int64_t k, double epilogue = 1) {
  return {.form = form, .shape = {m, n, k}, .epilogue_tiles = epilogue, .multiprocessors = 132};
}

TEST(GpuCandidates, AreScoredAsTheyMeasured) {
  const auto tile = [](const hopper::Problem& p) { return hopper::untuned(p, kTwo).kernel->tile; };
  // The better of the two at the card's power limit (docs/measurements.md).
  EXPECT_EQ(tile(product(Form::TN, 16384, 2048, 2048)), HopperTile::pingpong_128x128);
  // RmsNormSwiGlu's two tiles.
  for (const auto& [n, k] : {std::pair(11264, 2048), {22016, 4096}})
    EXPECT_EQ(tile(product(Form::TN, 16384, n, k, 2)), HopperTile::pingpong_128x128) << n << ", " << k;
  EXPECT_EQ(tile(product(Form::TN, 16384, 44032, 8192, 2)), HopperTile::cooperative_128x256);
  for (const auto& [n, k] : {std::pair(2048, 5632), {4096, 4096}, {22016, 4096}, {8192, 22016}, {44032, 8192}})
    EXPECT_EQ(tile(product(Form::TN, 16384, n, k)), HopperTile::cooperative_128x256) << n << ", " << k;
  for (const auto& [m, n] : {std::pair(2048, 5632), {4096, 11008}, {22016, 4096}})
    EXPECT_EQ(tile(product(Form::NT, m, n, 16384)), HopperTile::cooperative_128x256) << m << ", " << n;
  // Six waves of twice the tile where eleven do.
  EXPECT_EQ(tile(product(Form::NT, 11264, 2048, 16384)), HopperTile::pingpong_128x128);
  // RmsNormBackward's three tiles, SwiGluBackward's five.
  for (const auto& [n, k] : {std::pair(2048, 11264), {4096, 12288}, {8192, 44032}})
    EXPECT_EQ(tile(product(Form::NN, 16384, n, k, 3)), HopperTile::cooperative_128x256) << n << ", " << k;
  EXPECT_EQ(tile(product(Form::NN, 16384, 2048, 6144, 3)), HopperTile::pingpong_128x128);
  for (const auto& [n, k] : {std::pair(5632, 2048), {11008, 4096}, {22016, 8192}})
    EXPECT_EQ(tile(product(Form::NN, 16384, n, k, 5)), HopperTile::pingpong_128x128) << n << ", " << k;
  // What a program loads and stores is not hidden there.
  EXPECT_EQ(tile(product(Form::TN, 16384, 22016, 4096, 5)), HopperTile::pingpong_128x128);
}

TEST(GpuCandidates, KeepWhatIsInFlightNearlyASquare) {
  const auto band = [](const hopper::Problem& p) { return hopper::untuned(p, kTwo).band; };
  for (const int64_t n : {44032, 11264, 128256})  // 44032 is 172 columns of clusters, no multiple of 8
    EXPECT_EQ(band(product(Form::TN, 16384, n, 8192)), 8) << n;
  EXPECT_EQ(band(product(Form::NT, 4096, 11008, 16384)), 8);
  // 23 MB of b stay in the second-level cache.
  EXPECT_EQ(band(product(Form::NN, 16384, 5632, 2048, 5)), 1);
}

TEST(GpuCandidates, CountWavesOfClusters) {
  EXPECT_EQ(hopper::waves(product(Form::NT, 2048, 2048, 16384), HopperTile::pingpong_128x128), 2);
  EXPECT_EQ(hopper::waves(product(Form::NT, 11264, 2048, 16384), HopperTile::pingpong_128x128), 11);
  EXPECT_EQ(hopper::waves(product(Form::NT, 11264, 2048, 16384), HopperTile::cooperative_128x256), 6);
  EXPECT_EQ(hopper::waves(product(Form::TN, 1, 1, 64), HopperTile::pingpong_128x128), 1);
}

TEST(GpuCandidates, SayWhatTheyLostBy) {
  const auto all = hopper::candidates(product(Form::TN, 16384, 16384, 2048, 2), kTwo);
  ASSERT_EQ(all.size(), 2 * std::size(hopper::kBands));
  EXPECT_EQ(all[0].reason, "");
  EXPECT_EQ(hopper::text_of(all[0].kernel->tile, all[0].band), "pingpong 128x128, 8 rows of clusters side by side");
  double last = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].reason.empty(), i == 0);
    EXPECT_GE(all[i].score, last);
    last = all[i].score;
  }
  EXPECT_NE(all[1].reason.find("its order's reads cost"), std::string::npos) << all[1].reason;
}

TEST(GpuSlices, ArePredictedWhereTilesAreFew) {
  const auto slices = [](const hopper::Problem& p) { return hopper::best_slices(p); };
  // Weight gradients of d = 1024 over many tokens: 16 clusters of tiles, where a GPU has 66.
  EXPECT_GT(slices(product(Form::NT, 1024, 1024, 16384)), 1);
  EXPECT_GT(slices(product(Form::NT, 512, 512, 16384)), slices(product(Form::NT, 1024, 1024, 16384)));
  EXPECT_GT(slices(product(Form::TN, 16, 2048, 8192)), 1);  // a few tokens
  for (const auto& [m, n] : {std::pair(2048, 2048), {11264, 2048}, {4096, 11008}})
    EXPECT_EQ(slices(product(Form::NT, m, n, 16384)), 1) << m << ", " << n;
  for (const auto& [m, n, k] : {std::tuple(128, 128, 64), {0, 512, 16384}, {512, 0, 16384}, {512, 512, 0}})
    EXPECT_EQ(slices(product(Form::NT, m, n, k)), 1) << m << ", " << n << ", " << k;
}

TEST_F(GpuPlan, SizesTheWorkspaceOfSlices) {
  const Matrix<bf16> deep_a = matrix(16, 256, 256), deep_b = matrix(30, 256, 256);
  const Factor of_a = coda::detail::factor(deep_a), of_b = coda::detail::factor(deep_b);
  const auto bytes = [&](int slices) {
    return hopper::workspace_of(of_a, of_b, hopper::slices_of(of_a, {slices})).bytes();
  };
  EXPECT_EQ(bytes(1), 16 * 32 * 4);
  EXPECT_EQ(bytes(3), 3 * 256 * 32 * 4);  // whole clusters of tiles, rows of a multiple of 4
  EXPECT_EQ(bytes(9), bytes(4)) << "one for each 64 of depth";
  test::expect_refused([&] { bytes(0); }, "slices", "0", "at least 1");
  const Factor high = coda::detail::factor(Matrix<bf16>(memory, int64_t{1} << 30, 256, 256));
  test::expect_refused([&] { hopper::slices_of(high, {3}); }, "slices", "3 of 1073741824 rows", "at most 1");
}

TEST_F(GpuPlan, SaysWhatTmaCannotReach) {
  const auto reason = [](const hopper::Plan& plan) {
    EXPECT_EQ(plan.kernel, nullptr);
    return plan.reason;
  };
  EXPECT_EQ(reason(plan_of(coda::detail::factor(matrix(16, 64, 64, 1)), b, Store<>{.out = out})),
            "a is not at a multiple of 16 bytes");
  EXPECT_EQ(reason(plan_of(a, coda::detail::factor(matrix(32, 64, 68)), Store<>{.out = out})),
            "rows of b are not a multiple of 16 bytes apart");
  EXPECT_EQ(reason(plan_of(a, b, Store<>{.out = matrix(16, 32, 36)})),
            "rows of out are not a multiple of 16 bytes apart");
  EXPECT_EQ(reason(plan_of(coda::detail::factor(matrix(16, 0, 64)), coda::detail::factor(matrix(32, 0, 64)),
                           Store<>{.out = out})),
            "there is nothing to multiply");
  // What TMA writes ends with 16 whole bytes; what it reads need not.
  EXPECT_EQ(reason(plan_of(a, coda::detail::factor(matrix(31, 64, 64)), Store<>{.out = matrix(16, 31, 32)})),
            "rows of out are not a multiple of 16 bytes long");
  // One row has no next one.
  EXPECT_NE(plan_of(coda::detail::factor(matrix(1, 64, 65)), b, Store<>{.out = matrix(1, 32, 33)}).kernel, nullptr);
  alignas(8) float gamma[34];
  Residual<Tensors<bf16>, GammaInEpilogue> residual{
      .residual = out, .gamma = {gamma + 1, 32}, .h = out, .x = matrix(16, 32, 32, 1024), .sum_sq = {gamma, 1, 16}};
  EXPECT_EQ(reason(plan_of(a, b, residual)), "gamma is not at a multiple of 8 bytes");
  residual.gamma = {gamma + 2, 32};
  EXPECT_NE(plan_of(a, b, residual).kernel, nullptr);
}

TEST_F(GpuPlan, SizesTheWorkspaceOfTwoPasses) {
  EXPECT_EQ(hopper::workspace_of(a, b).bytes(), 16 * 32 * 4);  // accumulators only
  const Factor odd = coda::detail::factor(matrix(16, 61, 61));
  const auto need = hopper::workspace_of(odd, b);
  EXPECT_EQ(need.a, 16 * 64 * 2);
  EXPECT_EQ(need.b, 0);
  // Of a factor that lies transposed the other side is padded.
  EXPECT_EQ(hopper::workspace_of(a, coda::detail::factor(transpose(matrix(64, 31, 31)))).b, 64 * 32 * 2);
  // Rows of accumulators are a multiple of 16 bytes apart, and what is behind begins at a multiple of 256.
  EXPECT_EQ(hopper::workspace_of(a, coda::detail::factor(matrix(31, 64, 64))).accumulators, 16 * 32 * 4);
  EXPECT_EQ(hopper::workspace_of(coda::detail::factor(matrix(3, 64, 64)), b).accumulators, 512);
}

TEST_F(GpuPlan, RefusesWhatTheEngineDoesNotDo) {
  EXPECT_NO_THROW(hopper::check_factors(a, b, kBoth));
  float values[64];
  const Factor of_float = coda::detail::factor(Matrix<float>(values, 1, 64));
  test::expect_refused([&] { hopper::check_factors(of_float, b, kBoth); }, "a", "a matrix of float",
                       "one of bf16, which is what the GPU engine multiplies");
  const Factor x_stored_otherwise = coda::detail::factor(transpose(matrix(64, 16, 16)));
  test::expect_refused([&] { hopper::check_factors(x_stored_otherwise, b, kBoth); }, "a",
                       "transposed beside a b that is not", "one of the forms x Wᵀ, dy W and dyᵀ x on a GPU");
  const Factor w_stored_otherwise = coda::detail::factor(transpose(matrix(64, 32, 32)));
  test::expect_refused([&] { hopper::check_factors(x_stored_otherwise, w_stored_otherwise, kBoth); }, "b",
                       "a factor of a product of form NT", "a form that CODA_HOPPER_PROGRAM names for this program");
  const Factor high = coda::detail::factor(Matrix<bf16>(memory, int64_t{1} << 31, 64, 64));
  EXPECT_THROW(hopper::check_factors(high, b, kBoth), OperandError);
}

}  // namespace
}  // namespace coda
