#include "embedding.h"

#include <algorithm>
#include <cmath>

namespace coda::llama {

template <class E>
void embedding_forward(Cpu& cpu, Matrix<const float> table, Vector<const int32_t> tokens, double rms_eps,
                       Stream<E> out) {
  constexpr int64_t kTokens = 64;
  const int64_t d = table.cols;
  cpu.parallel_for((tokens.size + kTokens - 1) / kTokens, [&](int64_t block, int) {
    const int64_t end = std::min(tokens.size, (block + 1) * kTokens);
    for (int64_t i = block * kTokens; i < end; ++i) {
      const float* row = table.row(tokens[i]);
      E* h = out.h.row(i);
      double sum = 0;
      for (int64_t j = 0; j < d; ++j) {
        h[j] = E(row[j]);
        sum += static_cast<double>(h[j]) * static_cast<double>(h[j]);
      }
      out.inv_rms[i] = static_cast<float>(1 / std::sqrt(sum / static_cast<double>(d) + rms_eps));
    }
  });
}

template <class E>
void embedding_backward(Cpu& cpu, Matrix<const E> d_h, Vector<const int32_t> tokens, Matrix<float> d_table, bool add) {
  // A thread owns columns: no two of them meet in a row, and the order of tokens is the same for every number of threads.
  constexpr int64_t kColumns = 64;
  cpu.parallel_for((d_table.cols + kColumns - 1) / kColumns, [&](int64_t block, int) {
    const int64_t first = block * kColumns, count = std::min(kColumns, d_table.cols - first);
    if (!add)
      for (int64_t row = 0; row < d_table.rows; ++row) std::fill_n(d_table.row(row) + first, count, 0.f);
    for (int64_t i = 0; i < tokens.size; ++i) {
      const E* from = d_h.row(i) + first;
      float* to = d_table.row(tokens[i]) + first;
      for (int64_t j = 0; j < count; ++j) to[j] += static_cast<float>(from[j]);
    }
  });
}

#define CODA_EMBEDDING(E)                                                                               \
  template void embedding_forward(Cpu&, Matrix<const float>, Vector<const int32_t>, double, Stream<E>); \
  template void embedding_backward(Cpu&, Matrix<const E>, Vector<const int32_t>, Matrix<float>, bool);
CODA_EMBEDDING(float)
CODA_EMBEDDING(bf16)
#undef CODA_EMBEDDING

}  // namespace coda::llama
