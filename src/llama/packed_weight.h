// Weights as a checkpoint has them, a matrix for each of gate, up, q, k and v, and one weight as a product reads it: packed, and with
// the gamma of the norm in front folded in. For callers that keep the former, and pack in every pass; src/llama/parameters.h keeps its
// matrices packed, and has gammas folded in and their gradients taken out.
#pragma once
#include "coda/cpu.h"
#include "coda/interleave.h"
#include "coda/tensor.h"

namespace coda {

class Gpu;

namespace llama {

/// Where a plain matrix's rows stand in a packed weight.
struct PackedRows {
  enum class Order {
    plain,
    gate,       // first of pairs over the whole matrix
    up,         // second of pairs
    half_split  // pairs within heads of head_dim rows (coda/rotary.h)
  };
  Order order = Order::plain;
  int64_t first = 0;      // of the packed weight, where the matrix begins
  int64_t head_dim = 16;  // of half_split

  CODA_FN int64_t packed(int64_t i) const {
    if (order == Order::gate || order == Order::up) return first + packed_row(i, order == Order::up);
    if (order == Order::plain) return first + i;
    const int64_t within = i % head_dim, half = head_dim / 2;
    return first + i - within + packed_row(within % half, within >= half);
  }
};

/// packed[rows.packed(i)] = plain[i] ⊙ gamma, rounded once; gamma empty: plain itself. plain [N, K], gamma [K], packed [·, K].
/// W and G, the elements of plain and gamma, are float or bf16, each by itself; so is E on a Cpu, and bf16 on a Gpu.
template <class W, class G, class E>
void pack(Cpu& cpu, Matrix<const W> plain, const PackedRows& rows, Vector<const G> gamma, Matrix<E> packed);
template <class W, class G>
void pack(const Gpu& gpu, Matrix<const W> plain, const PackedRows& rows, Vector<const G> gamma, Matrix<bf16> packed);

/// Rows of a slot of d_gamma.
inline constexpr int64_t kUnpackRows = 64;
/// Slots of a matrix of so many rows.
CODA_FN constexpr int64_t unpack_slots(int64_t rows) {
  return (rows + kUnpackRows - 1) / kUnpackRows;
}

/// From the packed weight's gradient [·, K] those of plain, d_plain[i] = packed[rows.packed(i)] ⊙ gamma, and of gamma: the slots of
/// d_gamma [⌈N/64⌉, K] = Σ packed[rows.packed(i)] ⊙ plain[i] over their rows; coda::total adds them. An output without data is not
/// computed. gamma empty: ones. add: d_plain is added to what is there. d_plain may be packed itself where rows keeps the order.
template <class W, class G>
void unpack_gradient(Cpu& cpu, Matrix<const float> packed, const PackedRows& rows, Matrix<const W> plain,
                     Vector<const G> gamma, Matrix<W> d_plain, Matrix<float> d_gamma, bool add = false);
template <class W, class G>
void unpack_gradient(const Gpu& gpu, Matrix<const float> packed, const PackedRows& rows, Matrix<const W> plain,
                     Vector<const G> gamma, Matrix<W> d_plain, Matrix<float> d_gamma, bool add = false);

/// A value for each of the product's columns that a plain matrix of n rows makes: packed[rows.packed(i)] = plain[i mod plain.size],
/// i < n. plain: a bias [n], or what repeats over heads. plain.size divides n. W: float or bf16.
template <class W>
void pack_vector(Cpu& cpu, Vector<const W> plain, const PackedRows& rows, int64_t n, Vector<float> packed);
template <class W>
void pack_vector(const Gpu& gpu, Vector<const W> plain, const PackedRows& rows, int64_t n, Vector<float> packed);

/// Its gradient: d_plain[j] = Σ packed[rows.packed(i)] over i < n that are j mod d_plain.size, in the order of i; rounded once.
template <class W>
void unpack_vector_gradient(Cpu& cpu, Vector<const float> packed, const PackedRows& rows, int64_t n, Vector<W> d_plain);
template <class W>
void unpack_vector_gradient(const Gpu& gpu, Vector<const float> packed, const PackedRows& rows, int64_t n,
                            Vector<W> d_plain);

}  // namespace llama

}  // namespace coda
