// Element types and views of tensors. A view owns nothing.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define CODA_FN __host__ __device__ __forceinline__
#else
#define CODA_FN inline __attribute__((always_inline))
#endif

namespace coda {

/// bfloat16: the upper half of a float. Conversion from float rounds to nearest, ties to even; NaN stays NaN.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  CODA_FN constexpr explicit bf16(float value) : bits(round(std::bit_cast<uint32_t>(value))) {}
  CODA_FN constexpr operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }

 private:
  CODA_FN static constexpr uint16_t round(uint32_t u) {
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    // A NaN keeps its upper bits and becomes quiet: rounding could carry it into infinity.
    return static_cast<uint16_t>(is_nan ? (u >> 16) | 0x0040u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

/// A row-major matrix: element (i, j) is data[i * stride + j]. stride >= cols, in elements.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  Matrix() = default;
  CODA_FN constexpr Matrix(T* data_, int64_t rows_, int64_t cols_) : Matrix(data_, rows_, cols_, cols_) {}
  CODA_FN constexpr Matrix(T* data_, int64_t rows_, int64_t cols_, int64_t stride_)
      : data(data_), rows(rows_), cols(cols_), stride(stride_) {}
  CODA_FN constexpr operator Matrix<const T>() const requires(!std::is_const_v<T>) {
    return {data, rows, cols, stride};
  }
  CODA_FN constexpr T* row(int64_t i) const { return data + i * stride; }
  CODA_FN constexpr T& operator()(int64_t i, int64_t j) const { return data[i * stride + j]; }
  /// Rows [first, first + count).
  CODA_FN constexpr Matrix row_range(int64_t first, int64_t count) const {
    return {data + first * stride, count, cols, stride};
  }
  /// Columns [first, first + count).
  CODA_FN constexpr Matrix col_range(int64_t first, int64_t count) const { return {data + first, rows, count, stride}; }
};

/// size values next to each other.
template <class T>
struct Vector {
  T* data = nullptr;
  int64_t size = 0;

  Vector() = default;
  CODA_FN constexpr Vector(T* data_, int64_t size_) : data(data_), size(size_) {}
  CODA_FN constexpr operator Vector<const T>() const requires(!std::is_const_v<T>) { return {data, size}; }
  CODA_FN constexpr T& operator[](int64_t i) const { return data[i]; }
};

/// The transpose of a row-major matrix, as an operand of a product.
template <class T>
struct Transposed {
  Matrix<T> of;
};
template <class T>
CODA_FN constexpr Transposed<T> transpose(Matrix<T> m) {
  return {m};
}

}  // namespace coda
