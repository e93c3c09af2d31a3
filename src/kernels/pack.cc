#include "cpu/pack.h"

#include "coda/cpu/lanes.h"

namespace coda::cpu {

namespace {

/// out[k][j] = in[j][k] for an 8 × 8 tile, through registers where there are any.
template <class Isa, class T>
CODA_FN void transpose8(const T* in, int64_t in_stride, float* out, int64_t out_stride) {
#if defined(__AVX2__)
  using Eight = Lanes<isa::avx2>;
  __m256 r[8], t[8];
  for (int j = 0; j < 8; ++j) {
    if constexpr (std::is_same_v<T, float>)
      r[j] = _mm256_loadu_ps(in + j * in_stride);
    else
      r[j] = _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j * in_stride))), 16));
  }
  static_assert(Eight::width == 8);
  for (int j = 0; j < 8; j += 2) {
    t[j] = _mm256_unpacklo_ps(r[j], r[j + 1]);
    t[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
  }
  for (int j = 0; j < 8; j += 4) {
    r[j] = _mm256_shuffle_ps(t[j], t[j + 2], 0x44);
    r[j + 1] = _mm256_shuffle_ps(t[j], t[j + 2], 0xEE);
    r[j + 2] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0x44);
    r[j + 3] = _mm256_shuffle_ps(t[j + 1], t[j + 3], 0xEE);
  }
  for (int k = 0; k < 4; ++k) {
    _mm256_storeu_ps(out + k * out_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
    _mm256_storeu_ps(out + (k + 4) * out_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
  }
#else
  for (int j = 0; j < 8; ++j)
    for (int k = 0; k < 8; ++k) out[k * out_stride + j] = static_cast<float>(in[j * in_stride + k]);
#endif
}

/// out[k][j] = in[j][k], j < rows, k < cols.
template <class Isa, class T>
CODA_FN void transpose_into(const T* in, int64_t in_stride, int64_t rows, int64_t cols, float* out,
                            int64_t out_stride) {
  int64_t k = 0;
  for (; k + 8 <= cols; k += 8) {
    int64_t j = 0;
    for (; j + 8 <= rows; j += 8)
      transpose8<Isa>(in + j * in_stride + k, in_stride, out + k * out_stride + j, out_stride);
    for (; j < rows; ++j)
      for (int64_t i = k; i < k + 8; ++i) out[i * out_stride + j] = static_cast<float>(in[j * in_stride + i]);
  }
  for (; k < cols; ++k)
    for (int64_t j = 0; j < rows; ++j) out[k * out_stride + j] = static_cast<float>(in[j * in_stride + k]);
}

/// out[i][k] = in[i][k].
template <class Isa, class T>
CODA_FN void copy_into(const T* in, int64_t in_stride, int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  constexpr int width = Lanes<Isa>::width;
  for (int64_t i = 0; i < rows; ++i) {
    const T* from = in + i * in_stride;
    float* to = out + i * out_stride;
    int64_t k = 0;
    for (; k + width <= cols; k += width) store<Isa>(to + k, load<Isa>(from + k));
    for (; k < cols; ++k) to[k] = static_cast<float>(from[k]);
  }
}

template <class Isa, class T>
CODA_FN void columns_of(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths,
                        float* out, int64_t width) {
  const T* data = static_cast<const T*>(factor.data);
  if (factor.transposed)
    copy_into<Isa>(data + depth * factor.stride + row, factor.stride, depths, rows, out, width);
  else
    transpose_into<Isa>(data + row * factor.stride + depth, factor.stride, rows, depths, out, width);
  if (rows < width)
    for (int64_t k = 0; k < depths; ++k)
      for (int64_t j = rows; j < width; ++j) out[k * width + j] = 0;
}

template <class Isa, class T>
CODA_FN void rows_of(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out,
                     int64_t stride) {
  const T* data = static_cast<const T*>(factor.data);
  if (factor.transposed)
    transpose_into<Isa>(data + depth * factor.stride + row, factor.stride, depths, rows, out, stride);
  else
    copy_into<Isa>(data + row * factor.stride + depth, factor.stride, rows, depths, out, stride);
}

}  // namespace

template <class Isa>
void pack_columns(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out,
                  int64_t width) {
  if (factor.element == ElementType::float32)
    columns_of<Isa, float>(factor, row, rows, depth, depths, out, width);
  else
    columns_of<Isa, bf16>(factor, row, rows, depth, depths, out, width);
}

template <class Isa>
void pack_rows(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out,
               int64_t stride) {
  if (factor.element == ElementType::float32)
    rows_of<Isa, float>(factor, row, rows, depth, depths, out, stride);
  else
    rows_of<Isa, bf16>(factor, row, rows, depth, depths, out, stride);
}

template void pack_columns<isa::CODA_ISA>(const detail::Factor&, int64_t, int64_t, int64_t, int64_t, float*, int64_t);
template void pack_rows<isa::CODA_ISA>(const detail::Factor&, int64_t, int64_t, int64_t, int64_t, float*, int64_t);

}  // namespace coda::cpu
