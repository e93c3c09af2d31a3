// Matrices of the GPU between the plain order of PyTorch's tensors and coda's packed order (coda/interleave.h).
#pragma once
#include "coda/interleave.h"
#include "coda/tensor.h"

namespace coda::bench {

/// The halves of every group of the first end indices are partners; the others stay where they are. Of gate and up a group is all
/// of them, of q and k a head. By default nothing is packed.
struct PackedOrder {
  int64_t group = 16, end = 0;

  CODA_FN int64_t packed(int64_t i) const {
    if (i >= end) return i;
    const int64_t within = i % group, half = group / 2;
    return i - within + packed_row(within % half, within >= half);
  }
};

struct PackedOrders {
  PackedOrder rows, cols;
};

/// packed = plain in this order, its columns times gamma [cols], bf16, where that is not null. From, To: bf16 or float. On the
/// default stream, as the others.
template <class From, class To>
void pack(Matrix<const From> plain, const PackedOrders& order, Matrix<To> packed, const bf16* gamma = nullptr);

/// plain = the columns of packed that in plain order are [first_col, first_col + plain.cols).
template <class From, class To>
void unpack(Matrix<const From> packed, const PackedOrders& order, Matrix<To> plain, int64_t first_col = 0);

/// PyTorch's labels are int64.
void narrow(Vector<const int64_t> from, Vector<int32_t> to);

}  // namespace coda::bench
