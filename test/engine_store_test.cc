// The plain product and the product that adds, on the CPU engine against the oracle.
#include "coda/programs/store.h"
#include "program_cases.h"

namespace coda::test {
namespace {

template <class P>
class Store_ : public testing::Test {};
using Programs =
    testing::Types<Store<Tensors<float>>, Store<Tensors<bf16>>, Store<Tensors<bf16>, float>,
                   StoreBiased<Tensors<float>>, StoreBiased<Tensors<bf16>>, BiasGradient<Tensors<float>>,
                   BiasGradient<Tensors<bf16>>, AccumulateInto<Tensors<float>>, AccumulateInto<Tensors<bf16>>>;
TYPED_TEST_SUITE(Store_, Programs);

TYPED_TEST(Store_, Products) {
  check_products<TypeParam>(1, {}, AsTheOracle{}, Forms::all);
}
TYPED_TEST(Store_, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

}  // namespace
}  // namespace coda::test
