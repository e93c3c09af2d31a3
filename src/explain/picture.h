// A Llama layer as one picture: products with programs in their epilogues, and the tensors between them.
#pragma once
#include <string>
#include <vector>

#include "explain/block.h"

namespace coda::explain {

/// An SVG on a white ground. Forward runs down on the left, backward up on the right, each along its residual stream; what is
/// kept stands between them, and row statistics run beside them, dashed. block is completed; rows are its.
std::string block_svg(const Block& block, const std::vector<Row>& rows);

}  // namespace coda::explain
