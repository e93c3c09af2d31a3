// Programs that a user writes, on the CPU engine against the oracle.
#include "user_program.h"

#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

template <class P>
class UserProgram : public testing::Test {};
using Programs = testing::Types<HeadNorm<F>, HeadNorm<B>, GroupSoftmax<F>, GroupSoftmax<B>, CausalScores<F>,
                                PairPositions<F>, ManyFields<F>, ManyFields<B>, Spread<F>, Spread<B>>;
TYPED_TEST_SUITE(UserProgram, Programs);

TYPED_TEST(UserProgram, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(UserProgram, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

}  // namespace
}  // namespace coda::test
