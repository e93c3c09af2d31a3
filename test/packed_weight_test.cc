// Weights as checkpoints have them, packed and folded for a product, and its gradient back: against the same in double, element by
// element.
#include "llama/packed_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "coda/finish.h"
#include "coda/rotary.h"

namespace coda::llama {
namespace {

using Order = PackedRows::Order;

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

template <class T>
std::vector<T> normals(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& x : values) x = T(normal(random));
  return values;
}

/// One rounding of what is exact.
template <class T>
double rounding(double exact) {
  return std::abs(exact) * (std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-23) + 1e-30;
}

TEST(PackedWeight, RowsGoWhereInterleaveAndPackHeadsPutThem) {
  const PackedRows gate{.order = Order::gate}, up{.order = Order::up},
      heads{.order = Order::half_split, .head_dim = 48}, behind{.order = Order::plain, .first = 96};
  for (int64_t i = 0; i < 24; ++i) {
    EXPECT_EQ(gate.packed(i), packed_row(i, false));
    EXPECT_EQ(up.packed(i), packed_row(i, true));
  }
  for (int64_t i = 0; i < 96; ++i) {
    EXPECT_EQ(heads.packed(i), i / 48 * 48 + packed_rotary_row(i % 48, {.width = 48, .rotary = 48})) << i;
    EXPECT_EQ(behind.packed(i), 96 + i);
  }
}

/// A head's rows, 80 behind the first 16 of a packed weight of 112 rows, the rest of which stays as it is.
template <class W, class G, class E>
void check_pack(bool folded) {
  constexpr int64_t kRows = 80, kCols = 37, kFirst = 16, kPacked = 112;
  const PackedRows rows{.order = Order::half_split, .first = kFirst, .head_dim = 16};
  const auto plain = normals<W>(kRows * kCols, 1);
  const auto gamma = normals<G>(kCols, 2);
  std::vector<E> packed(kPacked * kCols, E(kPoison));
  Cpu cpu(2);
  pack(cpu, Matrix<const W>(plain.data(), kRows, kCols), rows,
       folded ? Vector<const G>(gamma.data(), kCols) : Vector<const G>{}, Matrix<E>(packed.data(), kPacked, kCols));
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kCols; ++j) {
      const double want = double{plain[i * kCols + j]} * (folded ? double{gamma[j]} : 1);
      ASSERT_NEAR(double{packed[rows.packed(i) * kCols + j]}, want, rounding<E>(want))
          << "row " << i << ", column " << j;
    }
  for (int64_t i = 0; i < kPacked; ++i)
    if (i < kFirst || i >= kFirst + kRows) {
      for (int64_t j = 0; j < kCols; ++j) ASSERT_TRUE(std::isnan(float{packed[i * kCols + j]})) << "row " << i;
    }

  const auto d_packed = normals<float>(kPacked * kCols, 3);
  std::vector<W> d_plain(kRows * kCols, W(kPoison));
  std::vector<float> slots(2 * kCols, kPoison), d_gamma(kCols, kPoison);
  unpack_gradient(cpu, Matrix<const float>(d_packed.data(), kPacked, kCols), rows,
                  Matrix<const W>(plain.data(), kRows, kCols),
                  folded ? Vector<const G>(gamma.data(), kCols) : Vector<const G>{},
                  Matrix<W>(d_plain.data(), kRows, kCols), Matrix<float>(slots.data(), 2, kCols));
  total(cpu, Matrix<const float>(slots.data(), 2, kCols), Vector<float>(d_gamma.data(), kCols));
  for (int64_t j = 0; j < kCols; ++j) {
    double want_gamma = 0, size = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      const double d = d_packed[rows.packed(i) * kCols + j], want = d * (folded ? double{gamma[j]} : 1);
      ASSERT_NEAR(double{d_plain[i * kCols + j]}, want, rounding<W>(want)) << "row " << i << ", column " << j;
      want_gamma += d * double{plain[i * kCols + j]};
      size += std::abs(d * double{plain[i * kCols + j]});
    }
    ASSERT_NEAR(d_gamma[j], want_gamma, size * 64 * 0x1p-24) << "column " << j;
  }
}

TEST(PackedWeight, IsThePlainOneFoldedAndSoIsItsGradient) {
  for (const bool folded : {false, true}) {
    check_pack<float, float, float>(folded);
    check_pack<float, bf16, bf16>(folded);
    check_pack<bf16, float, bf16>(folded);
    check_pack<bf16, bf16, bf16>(folded);
  }
}

/// The columns of 5 heads, 16 behind the first of 112, from a vector of `size` values; the others stay as they are.
template <class W>
void check_vector(int64_t size) {
  constexpr int64_t kColumns = 80, kFirst = 16, kPacked = 112;
  const PackedRows rows{.order = Order::half_split, .first = kFirst, .head_dim = 16};
  const auto plain = normals<W>(size, 1);
  std::vector<float> packed(kPacked, kPoison);
  Cpu cpu(2);
  pack_vector(cpu, Vector<const W>(plain.data(), size), rows, kColumns, Vector<float>(packed.data(), kPacked));
  for (int64_t i = 0; i < kColumns; ++i) ASSERT_EQ(packed[rows.packed(i)], float{plain[i % size]}) << "column " << i;
  for (int64_t i = 0; i < kPacked; ++i)
    if (i < kFirst || i >= kFirst + kColumns) {
      ASSERT_TRUE(std::isnan(packed[i])) << "column " << i;
    }

  const auto d_packed = normals<float>(kPacked, 2);
  std::vector<W> d_plain(size, W(kPoison));
  unpack_vector_gradient(cpu, Vector<const float>(d_packed.data(), kPacked), rows, kColumns,
                         Vector<W>(d_plain.data(), size));
  for (int64_t j = 0; j < size; ++j) {
    double want = 0, sum_of_sizes = 0;
    for (int64_t i = j; i < kColumns; i += size) {
      want += double{d_packed[rows.packed(i)]};
      sum_of_sizes += std::abs(double{d_packed[rows.packed(i)]});
    }
    ASSERT_NEAR(double{d_plain[j]}, want, rounding<W>(want) + sum_of_sizes * 4 * 0x1p-24) << "element " << j;
  }
}

TEST(PackedWeight, AVectorIsSpreadOverColumnsAndItsGradientSummedOverHeads) {
  for (const int64_t size : {80, 16}) {
    check_vector<float>(size);
    check_vector<bf16>(size);
  }
}

TEST(PackedWeight, GradientsThatAreNotAskedForAreNotWritten) {
  constexpr int64_t kRows = 16, kCols = 8;
  const auto plain = normals<float>(kRows * kCols, 1), d_packed = normals<float>(kRows * kCols, 2),
             gamma = normals<float>(kCols, 3);
  std::vector<float> slots(kCols, kPoison), d_plain(kRows * kCols, kPoison);
  Cpu cpu(1);
  const Matrix<const float> d(d_packed.data(), kRows, kCols), w(plain.data(), kRows, kCols);
  const Vector<const float> g(gamma.data(), kCols);
  unpack_gradient(cpu, d, {}, w, g, Matrix<float>{}, Matrix<float>(slots.data(), 1, kCols));
  for (const float x : slots) EXPECT_FALSE(std::isnan(x));
  unpack_gradient(cpu, d, {}, w, g, Matrix<float>(d_plain.data(), kRows, kCols), Matrix<float>{});
  for (const float x : d_plain) EXPECT_FALSE(std::isnan(x));
}

TEST(PackedWeight, AGradientIsAddedToWhatIsThere) {
  constexpr int64_t kRows = 70, kCols = 8;
  const auto plain = normals<float>(kRows * kCols, 1), d_packed = normals<float>(kRows * kCols, 2),
             gamma = normals<float>(kCols, 3), before = normals<float>(kRows * kCols, 4);
  auto d_plain = before;
  Cpu cpu(2);
  unpack_gradient<float, float>(
      cpu, Matrix<const float>(d_packed.data(), kRows, kCols), {}, Matrix<const float>(plain.data(), kRows, kCols),
      Vector<const float>(gamma.data(), kCols), Matrix<float>(d_plain.data(), kRows, kCols), {}, true);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    const double want = double{before[i]} + double{d_packed[i]} * double{gamma[i % kCols]};
    ASSERT_NEAR(d_plain[i], want, 0x1p-22 * (1 + std::abs(want))) << "element " << i;
  }
}

}  // namespace
}  // namespace coda::llama
