#include "multiply.h"

#include "isa.h"

namespace coda::cpu {

namespace {

template <class Isa, Word word>
Multiplication of() {
  using Tile = RegisterTile<Isa>;
  return {.tile_rows = Tile::rows,
          .tile_cols = Tile::cols,
          .block_rows = Tile::block_rows,
          .block_words = kPanelBytes / (Tile::cols * int64_t{sizeof(float)}),
          .word = word,
          .pack_a = &pack_panels<Isa, Tile::rows, word>,
          .pack_b = &pack_panels<Isa, Tile::cols, word>,
          .multiply = &multiply<Isa, word>};
}

}  // namespace

Multiplication multiplication(ElementType a, ElementType b) {
  if (chosen_isa() == Isa::avx512_bf16 && a == ElementType::bfloat16 && b == ElementType::bfloat16)
    return of<isa::avx512, Word::bf16_pair>();
  return for_chosen_isa([](auto isa) { return of<decltype(isa), Word::float32>(); });
}

}  // namespace coda::cpu
