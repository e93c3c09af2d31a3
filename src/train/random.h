// Numbers that look random and are a pure function of their argument.
#pragma once
#include <cstdint>

namespace coda::train {

/// The finisher of splitmix64: a bijection of 64 bits in which every bit of the argument moves every bit of the value.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace coda::train
