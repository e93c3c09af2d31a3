// Memory of tensors and packed panels.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace coda::cpu {

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Memory = std::unique_ptr<T[], FreeMemory>;

/// count values, not initialised, aligned to 64 bytes. From a huge page's size on, aligned to such pages, which the system is asked for:
/// rows of a large matrix are each on a page of their own otherwise, and walking down a column costs more in translating
/// addresses than in reading. Throws std::bad_alloc.
template <class T>
Memory<T> allocate(int64_t count) {
  static_assert(std::is_trivially_destructible_v<T>);
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  void* p = nullptr;
  if (posix_memalign(&p, alignment, std::max<size_t>(1, (bytes + 63) / 64) * 64) != 0) throw std::bad_alloc();
  // A hint: where the system has no huge pages, ordinary ones do.
  if (alignment == kHugePage) madvise(p, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return Memory<T>(static_cast<T*>(p));
}

}  // namespace coda::cpu
