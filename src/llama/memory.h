#pragma once
#include <string>

namespace coda::llama {

/// Throws UsageError if bytes are more than this machine's memory and swap together: the system would promise them, and end the
/// program when they are used. what names them, in the plural.
void check_memory(const std::string& what, double bytes);

}  // namespace coda::llama
