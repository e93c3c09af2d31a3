// The fuzzer's seeds, and every file that it found a fault with, through the loaders once more (test/fuzz/loaders_fuzz.cc): the
// function ends the program where a loader does anything but return or throw a FileError.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

TEST(FuzzCorpus, EveryFileEndsInAValueOrAFileError) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(CODA_FUZZ_CORPUS)) {
    SCOPED_TRACE(entry.path().filename().string());
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    EXPECT_EQ(LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()), 0);
    // Every beginning of it, too.
    for (size_t size = 0; size < bytes.size(); size += 1 + bytes.size() / 64) {
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), size);
    }
    ++files;
  }
  EXPECT_GE(files, 28);
}

}  // namespace
