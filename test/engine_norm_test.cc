// The programs of RMSNorm on the CPU engine against the oracle.
#include "coda/programs/norm.h"
#include "program_cases.h"

namespace coda::test {
namespace {

using F = Tensors<float>;
using B = Tensors<bf16>;

template <class P>
class Norm : public testing::Test {};
using Programs = testing::Types<
    Residual<F>, Residual<B>, Residual<F, GammaInEpilogue>, Residual<B, GammaInEpilogue>,
    Residual<F, GammaPlusOneInEpilogue>, Residual<B, GammaPlusOneInEpilogue>, RmsNorm<F>, RmsNorm<B>,
    RmsNormBackward<F>, RmsNormBackward<B>, RmsNormBackward<F, StreamEnds>, RmsNormBackward<B, StreamEnds>,
    RmsNormBackward<F, StreamJoins, GammaInEpilogue>, RmsNormBackward<B, StreamJoins, GammaInEpilogue>,
    RmsNormBackward<F, StreamEnds, GammaInEpilogue>, RmsNormBackward<B, StreamEnds, GammaInEpilogue>,
    RmsNormBackward<F, StreamJoins, GammaPlusOneInEpilogue>, RmsNormBackward<B, StreamJoins, GammaPlusOneInEpilogue>>;
TYPED_TEST_SUITE(Norm, Programs);

TYPED_TEST(Norm, Products) {
  check_products<TypeParam>(seed_of<TypeParam>());
}
TYPED_TEST(Norm, Maps) {
  check_maps<TypeParam>(seed_of<TypeParam>());
}

TEST(NormInPlace, TheStreamOverwritesTheResidual) {
  check_products<Residual<F>>(3, {.in_place = {{"h", "residual"}}});
  check_products<Residual<B, GammaInEpilogue>>(4, {.in_place = {{"h", "residual"}}});
  check_products<RmsNormBackward<B>>(5, {.in_place = {{"d_h", "d_residual"}}});
  check_products<RmsNormBackward<F>>(6, {.in_place = {{"d_h", "h"}}});
}

TEST(NormInPlace, OverTheMatrixOfAMap) {
  check_maps<RmsNorm<F>>(7, {.in_place = {{"y", kMapped}}}, AsTheOracle{}, InPlaceOf<float>{});
}

}  // namespace
}  // namespace coda::test
