#include "packed_weight.h"

#include <algorithm>

namespace coda::llama {

template <class W, class G, class E>
void pack(Cpu& cpu, Matrix<const W> plain, const PackedRows& rows, Vector<const G> gamma, Matrix<E> packed) {
  cpu.parallel_for(unpack_slots(plain.rows), [&](int64_t slot, int) {
    const int64_t end = std::min(plain.rows, (slot + 1) * kUnpackRows);
    for (int64_t i = slot * kUnpackRows; i < end; ++i) {
      const W* from = plain.row(i);
      E* to = packed.row(rows.packed(i));
      if (gamma.data == nullptr)
        for (int64_t j = 0; j < plain.cols; ++j) to[j] = E(static_cast<float>(from[j]));
      else
        for (int64_t j = 0; j < plain.cols; ++j) to[j] = E(static_cast<float>(from[j]) * static_cast<float>(gamma[j]));
    }
  });
}

template <class W, class G>
void unpack_gradient(Cpu& cpu, Matrix<const float> packed, const PackedRows& rows, Matrix<const W> plain,
                     Vector<const G> gamma, Matrix<W> d_plain, Matrix<float> d_gamma, bool add) {
  cpu.parallel_for(unpack_slots(plain.rows), [&](int64_t slot, int) {
    float* sum = d_gamma.data == nullptr ? nullptr : d_gamma.row(slot);
    if (sum != nullptr) std::fill_n(sum, plain.cols, 0.f);
    const int64_t end = std::min(plain.rows, (slot + 1) * kUnpackRows);
    for (int64_t i = slot * kUnpackRows; i < end; ++i) {
      const float* d = packed.row(rows.packed(i));
      const W* w = plain.row(i);
      if (sum != nullptr)
        for (int64_t j = 0; j < plain.cols; ++j) sum[j] += d[j] * static_cast<float>(w[j]);
      if (d_plain.data == nullptr) continue;
      W* to = d_plain.row(i);
      const auto store = [&](int64_t j, float value) { to[j] = W(add ? value + static_cast<float>(to[j]) : value); };
      if (gamma.data == nullptr)
        for (int64_t j = 0; j < plain.cols; ++j) store(j, d[j]);
      else
        for (int64_t j = 0; j < plain.cols; ++j) store(j, d[j] * static_cast<float>(gamma[j]));
    }
  });
}

template <class W>
void pack_vector(Cpu&, Vector<const W> plain, const PackedRows& rows, int64_t n, Vector<float> packed) {
  for (int64_t i = 0; i < n; ++i) packed[rows.packed(i)] = static_cast<float>(plain[i % plain.size]);
}

template <class W>
void unpack_vector_gradient(Cpu&, Vector<const float> packed, const PackedRows& rows, int64_t n, Vector<W> d_plain) {
  for (int64_t j = 0; j < d_plain.size; ++j) {
    float sum = 0;
    for (int64_t i = j; i < n; i += d_plain.size) sum += packed[rows.packed(i)];
    d_plain[j] = W(sum);
  }
}

#define CODA_PACKED_VECTOR(W)                                                                  \
  template void pack_vector(Cpu&, Vector<const W>, const PackedRows&, int64_t, Vector<float>); \
  template void unpack_vector_gradient(Cpu&, Vector<const float>, const PackedRows&, int64_t, Vector<W>);
CODA_PACKED_VECTOR(float)
CODA_PACKED_VECTOR(bf16)

#define CODA_PACKED_WEIGHT(W, G)                                                                                \
  template void pack(Cpu&, Matrix<const W>, const PackedRows&, Vector<const G>, Matrix<float>);                 \
  template void pack(Cpu&, Matrix<const W>, const PackedRows&, Vector<const G>, Matrix<bf16>);                  \
  template void unpack_gradient(Cpu&, Matrix<const float>, const PackedRows&, Matrix<const W>, Vector<const G>, \
                                Matrix<W>, Matrix<float>, bool);
CODA_PACKED_WEIGHT(float, float)
CODA_PACKED_WEIGHT(float, bf16)
CODA_PACKED_WEIGHT(bf16, float)
CODA_PACKED_WEIGHT(bf16, bf16)

}  // namespace coda::llama
