// The version that `coda --version` and run.json name; CMakeLists.txt has the same number.
#pragma once

namespace coda::train {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace coda::train
