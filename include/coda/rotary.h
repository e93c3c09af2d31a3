// What rotary positions need besides their programs (coda/programs/rope.h): frequencies, and the order of a head's rows.
#pragma once
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "coda/interleave.h"

namespace coda {

/// Which rows of a head are turned together, R its rotary width: i and i + R/2 (Hugging Face, GPT-NeoX), or 2i and 2i + 1 (the
/// paper, Meta's own Llama files, GPT-J). Weights in one order under the other's rotation give fluent nonsense.
enum class RotaryLayout { half_split, interleaved };

/// A head of q or k as a checkpoint has it. Where rotary < width (partial rotary embeddings) the rows behind the first rotary
/// ones are not turned.
struct RotaryHead {
  int64_t width = 128;   // a multiple of 16
  int64_t rotary = 128;  // a multiple of 16, at most width
  RotaryLayout layout = RotaryLayout::half_split;
};

/// Throws UsageError for widths that cannot be.
void check(const RotaryHead& head);

/// Radians per position of a head's width/2 pairs in packed order: theta^(−2i/rotary) for its first rotary/2, rounded to float
/// as Hugging Face's are, and 0 for the others, which the programs leave as they are.
std::vector<float> rotary_frequencies(int64_t width, int64_t rotary, double theta);

/// Frequencies in turns per position, each as two floats: turns_high and turns_low of the programs.
struct RotaryTurns {
  std::vector<float> high, low;
};
RotaryTurns to_turns(std::span<const float> radians);

/// Where row i of a head goes in packed order. Rows that are not turned stay where they are.
int64_t packed_rotary_row(int64_t i, const RotaryHead& head);

namespace detail {
template <class A, class B>
void check_heads(const Matrix<A>& plain, const RotaryHead& head, const Matrix<B>& packed) {
  check(head);
  if (plain.rows % head.width != 0)
    throw OperandError("plain", std::to_string(plain.rows) + " rows",
                       "a multiple of a head's " + std::to_string(head.width));
  if (packed.rows != plain.rows || packed.cols != plain.cols)
    throw OperandError("packed", std::to_string(packed.rows) + "x" + std::to_string(packed.cols),
                       "the " + std::to_string(plain.rows) + "x" + std::to_string(plain.cols) + " of plain");
}
}  // namespace detail

/// The rows of q's or k's weight, [heads · width, K], in packed order. Through it one layout becomes the other.
template <class T>
void pack_heads(Matrix<const T> plain, const RotaryHead& head, Matrix<T> packed) {
  detail::check_heads(plain, head, packed);
  for (int64_t i = 0; i < plain.rows; ++i) {
    const int64_t within = i % head.width;
    std::copy_n(plain.row(i), plain.cols, packed.row(i - within + packed_rotary_row(within, head)));
  }
}

/// The inverse of pack_heads.
template <class T>
void unpack_heads(Matrix<const T> packed, const RotaryHead& head, Matrix<T> plain) {
  detail::check_heads(plain, head, packed);
  for (int64_t i = 0; i < plain.rows; ++i) {
    const int64_t within = i % head.width;
    std::copy_n(packed.row(i - within + packed_rotary_row(within, head)), plain.cols, plain.row(i));
  }
}

}  // namespace coda
