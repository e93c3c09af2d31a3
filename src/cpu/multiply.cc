#include "multiply.h"

#include "isa.h"

namespace coda::cpu {

Multiplication multiplication() {
  return for_chosen_isa([](auto isa) {
    using I = decltype(isa);
    using Tile = RegisterTile<I>;
    return Multiplication{.tile_rows = Tile::rows,
                          .tile_cols = Tile::cols,
                          .pack_a = &pack_panels<I, Tile::rows>,
                          .pack_b = &pack_panels<I, Tile::cols>,
                          .multiply = &multiply<I>,
                          .copy_rows = &pack_rows<I>};
  });
}

}  // namespace coda::cpu
