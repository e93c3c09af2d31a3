// The macros of include/coda/hopper/kernels.h for a compiler that knows no CUDA: they list what they are given. For compiled.cc only.
#pragma once
#include "explain/compiled.h"

#define CODA_HOPPER_PROGRAM(forms, ...) CODA_HOPPER_PROGRAM_ON(pingpong_128x128, forms, __VA_ARGS__)
#define CODA_HOPPER_PROGRAM_ON(tile, forms, ...) \
  CODA_HOPPER_PROGRAM_TILES(tile, forms, cooperative_128x256, no_product, __VA_ARGS__)
#define CODA_HOPPER_PROGRAM_AND(other, other_forms, forms, ...) \
  CODA_HOPPER_PROGRAM_TILES(pingpong_128x128, forms, other, other_forms, __VA_ARGS__)

#define CODA_LISTED_AS(number) listed_##number
#define CODA_LISTED(number) CODA_LISTED_AS(number)
#define CODA_HOPPER_PROGRAM_TILES(tile, forms, other, other_forms, ...) \
  [[maybe_unused]] static const bool CODA_LISTED(__COUNTER__) = [] {    \
    using namespace coda::explain::listing;                             \
    using enum coda::detail::HopperTile;                                \
    return add(#__VA_ARGS__, tile, (forms), other, (other_forms));      \
  }()
