#include "cpu/pack.h"

#include <bit>

#include "coda/cpu/lanes.h"
#include "cpu/multiply.h"

namespace coda::cpu {

namespace {

#if defined(__AVX2__)
/// The next eight words along the depth.
template <Word word, class T>
CODA_FN __m256 eight_words(const T* in) {
  if constexpr (word == Word::bf16_pair)
    return _mm256_loadu_ps(reinterpret_cast<const float*>(in));
  else
    return load<isa::avx2>(in).v;
}
#endif

/// The word of value first, and of second where it is of a pair.
template <Word word, class T>
CODA_FN float word_of(T first, [[maybe_unused]] T second) {
  if constexpr (word == Word::bf16_pair)
    return std::bit_cast<float>(uint32_t{first.bits} | uint32_t{second.bits} << 16);
  else
    return static_cast<float>(first);
}

/// out[k][j] = in[j][k] for a tile of 8 × 8 words, through registers where there are any; rows of in past the first rows count as zero.
/// Rows of out are written in ascending order, so that they may overlap.
template <class Isa, Word word = Word::float32, class T>
CODA_FN void transpose8(const T* in, int64_t in_stride, float* out, int64_t out_stride, int64_t rows = 8) {
#if defined(__AVX2__)
  using Eight = Lanes<isa::avx2>;
  __m256 r[8], t[8];
  for (int j = 0; j < 8; ++j) {
    if (j >= rows)
      r[j] = _mm256_setzero_ps();
    else
      r[j] = eight_words<word>(in + j * in_stride);
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
  for (int k = 0; k < 4; ++k) _mm256_storeu_ps(out + k * out_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
  for (int k = 0; k < 4; ++k)
    _mm256_storeu_ps(out + (k + 4) * out_stride, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
#else
  static_assert(word == Word::float32);
  for (int k = 0; k < 8; ++k)
    for (int j = 0; j < 8; ++j) out[k * out_stride + j] = j < rows ? static_cast<float>(in[j * in_stride + k]) : 0.f;
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

/// A register of words of neighbouring rows: of the values at first, and of those at second where they are of pairs.
template <class Isa, Word word, class T>
CODA_FN Lanes<Isa> words_of(const T* first, [[maybe_unused]] const T* second) {
#if defined(__AVX512F__)
  if constexpr (word == Word::bf16_pair) {
    const auto widened = [](const T* p) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    return {_mm512_castsi512_ps(_mm512_or_si512(widened(first), _mm512_slli_epi32(widened(second), 16)))};
  } else
#endif
    return load<Isa>(first);
}

/// One panel from rows that lie along the depth.
template <class Isa, int kWidth, Word word, class T>
CODA_FN void transpose_panel(const T* in, int64_t stride, int64_t rows, int64_t depths, float* out) {
  constexpr int kLastTile = (kWidth - 1) / 8 * 8;
  constexpr int64_t step = values_of(word);
  int64_t k = 0;
  for (; k + 8 * step <= depths; k += 8 * step, out += 8 * kWidth)
    // From the right: where the last tile is wider than the panel, it writes over the beginning of the next row.
    for (int j = kLastTile; j >= 0; j -= 8)
      transpose8<Isa, word>(in + j * stride + k, stride, out + j, kWidth, rows - j);
  for (; k < depths; k += step, out += kWidth)
    for (int64_t j = 0; j < kWidth; ++j) {
      const T* value = in + j * stride + k;
      out[j] = j < rows ? word_of<word>(value[0], k + 1 < depths ? value[step - 1] : T{}) : 0.f;
    }
}

/// One panel from a factor stored the other way. readable: values of each row of in that may be read.
template <class Isa, int kWidth, Word word, class T>
CODA_FN void copy_panel(const T* in, int64_t stride, int64_t rows, int64_t readable, int64_t depths, float* out) {
  constexpr int width = Lanes<Isa>::width;
  constexpr int64_t step = values_of(word);
  int64_t k = 0;
  constexpr int64_t kAhead = 24 * step;  // depths: no prefetcher of a CPU follows rows that are pages apart
  if (readable >= (kWidth + width - 1) / width * width)
    for (; k + step <= depths; k += step, out += kWidth)
      for (int j = 0; j < kWidth; j += width) {
        __builtin_prefetch(in + (k + kAhead) * stride + j);
        store<Isa>(out + j, words_of<Isa, word>(in + k * stride + j, in + (k + step - 1) * stride + j));
      }
  for (; k < depths; k += step, out += kWidth)
    for (int64_t j = 0; j < kWidth; ++j) {
      const T* value = in + k * stride + j;
      out[j] = j < rows ? word_of<word>(value[0], k + 1 < depths ? value[(step - 1) * stride] : T{}) : 0.f;
    }
}

template <class Isa, int kWidth, Word word, class T>
CODA_FN void panels_of(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths,
                       float* out) {
  const T* data = static_cast<const T*>(factor.data);
  const int64_t panel = kWidth * ((depths + values_of(word) - 1) / values_of(word));
  for (int64_t i = 0; i < rows; i += kWidth, out += panel) {
    const int64_t left = rows - i;
    if (factor.transposed)
      copy_panel<Isa, kWidth, word>(data + depth * factor.stride + row + i, factor.stride, left, left, depths, out);
    else
      transpose_panel<Isa, kWidth, word>(data + (row + i) * factor.stride + depth, factor.stride, left, depths, out);
  }
}

}  // namespace

template <class Isa, int kWidth, Word word>
void pack_panels(const detail::Factor& factor, int64_t row, int64_t rows, int64_t depth, int64_t depths, float* out) {
  if constexpr (word == Word::float32)
    if (factor.element == ElementType::float32)
      return panels_of<Isa, kWidth, word, float>(factor, row, rows, depth, depths, out);
  panels_of<Isa, kWidth, word, bf16>(factor, row, rows, depth, depths, out);
}

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
#define CODA_PACK_PANELS(width, word)                                                 \
  template void pack_panels<isa::CODA_ISA, RegisterTile<isa::CODA_ISA>::width, word>( \
      const detail::Factor&, int64_t, int64_t, int64_t, int64_t, float*)
CODA_PACK_PANELS(rows, Word::float32);
CODA_PACK_PANELS(cols, Word::float32);
#if defined(__AVX512F__)
CODA_PACK_PANELS(rows, Word::bf16_pair);
CODA_PACK_PANELS(cols, Word::bf16_pair);
#endif

}  // namespace coda::cpu
