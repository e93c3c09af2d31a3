#include "coda/programs/head_norm.h"
#include "verify/programs.h"

namespace coda::verify {

namespace {

template <class S>
void add(Programs& programs) {
  programs.add<HeadNormRope<S, HeadWidth<128>>>();
  programs.add<HeadNormRope<S, HeadWidth<64>>>();
  programs.add<HeadNormRope<S, HeadWidth<128>, DropUnnormed>>();
  programs.add<HeadNormRopeBackward<S, HeadWidth<128>>>({{"d_qkv", kMapped}});
  programs.add<HeadNormRopeBackward<S, HeadWidth<64>>>({{"d_qkv", kMapped}});
}

}  // namespace

void add_head_norm(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
}

}  // namespace coda::verify
