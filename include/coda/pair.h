// Two values that a program sees together: gate and up, or the two coordinates that RoPE rotates.
#pragma once
#include <type_traits>

#include "coda/tensor.h"

namespace coda {

namespace detail {
template <class>
inline constexpr bool always_false = false;
}

template <class T>
struct Pair {
  using value_type = T;
  T first, second;

  /// An In field is a const Pair, and this overload is the one its assignment finds.
  template <class U>
  CODA_FN void operator=(const U&) const {
    static_assert(detail::always_false<U>, "an In field of an epilogue program is read-only; assign to an Out field");
  }
  template <class U>
  requires std::is_convertible_v<U, T> CODA_FN Pair& operator=(const Pair<U>& other) {
    first = other.first;
    second = other.second;
    return *this;
  }
};

template <class T>
CODA_FN Pair<T> operator+(Pair<T> a, Pair<T> b) {
  return {a.first + b.first, a.second + b.second};
}
template <class T>
CODA_FN Pair<T> operator-(Pair<T> a, Pair<T> b) {
  return {a.first - b.first, a.second - b.second};
}
template <class T>
CODA_FN Pair<T> operator*(Pair<T> a, Pair<T> b) {
  return {a.first * b.first, a.second * b.second};
}
// The scalar's type follows the pair's, so that a literal or a float broadcasts.
template <class T>
CODA_FN Pair<T> operator*(std::type_identity_t<T> s, Pair<T> a) {
  return {s * a.first, s * a.second};
}
template <class T>
CODA_FN Pair<T> operator*(Pair<T> a, std::type_identity_t<T> s) {
  return {a.first * s, a.second * s};
}
template <class T>
CODA_FN T dot(Pair<T> a, Pair<T> b) {
  return a.first * b.first + a.second * b.second;
}

}  // namespace coda
