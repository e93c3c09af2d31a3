#include "coda/programs/store.h"
#include "verify/programs.h"

namespace coda::verify {

namespace {

template <class S>
void add(Programs& programs) {
  programs.add<Store<S>>();
  programs.add<StoreBiased<S>>();
  programs.add<BiasGradient<S>>();
  programs.add<AccumulateInto<S>>();
}

}  // namespace

void add_store(Programs& programs) {
  add<Tensors<float>>(programs);
  add<Tensors<bf16>>(programs);
  programs.add<Store<Tensors<bf16>, float>>();
}

}  // namespace coda::verify
