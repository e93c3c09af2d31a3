// The file format: what is written comes back, and no damaged file is more than a sentence.
#include "train/safetensors.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>

#include "coda/error.h"
#include "coda/tensor.h"
#include "train/durable_file.h"
#include "train/json_file.h"

namespace coda::train {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  Safetensors() {
    std::string name = (fs::temp_directory_path() / "coda-safetensors-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    dir_ = name;
  }
  ~Safetensors() override { fs::remove_all(dir_); }

  fs::path write_bytes(const std::string& bytes) const {
    const fs::path path = dir_ / "x.safetensors";
    fs::remove(path);  // some file systems write an emptied and rewritten file to the disk at once, a fresh one later
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  /// A file with this header and this many bytes behind it.
  fs::path write_raw(const std::string& header, size_t data_bytes) const {
    return write_bytes(length(header.size()) + header + std::string(data_bytes, 'x'));
  }
  static std::string length(uint64_t size) { return {reinterpret_cast<const char*>(&size), 8}; }

  static std::string fault_of(const fs::path& path) {
    try {
      SafetensorsFile file(path);
    } catch (const FileError& error) {
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      EXPECT_LT(message.size(), 400u) << message;
      return message.substr(path.string().size() + 2);
    }
    return "(no fault)";
  }
  std::string fault(const std::string& header, size_t data_bytes) const {
    return fault_of(write_raw(header, data_bytes));
  }

  fs::path dir_;
};

TensorToWrite tensor_of(std::string name, std::vector<int64_t> shape, FloatFormat format, std::vector<float> values) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .format = format,
          .fill = [values = std::move(values)](std::span<float> out) {
            ASSERT_EQ(out.size(), values.size());
            std::ranges::copy(values, out.begin());
          }};
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

TEST_F(Safetensors, FloatsComeBackBitForBit) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {0.f, -0.f, 1.5f, -3e38f, 1e-42f, infinity, std::nanf("7"), 0.1f};
  write_safetensors(dir_ / "a",
                    {tensor_of("w", {2, 4}, FloatFormat::f32, values), tensor_of("s", {}, FloatFormat::f32, {7}),
                     tensor_of("none", {0, 3}, FloatFormat::f32, {})},
                    {{"format", "pt"}, {"step", "12"}});
  const SafetensorsFile file(dir_ / "a");
  EXPECT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors().at("w").shape, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(file.tensors().at("w").dtype, "F32");
  EXPECT_EQ(file.tensors().at("s").size(), 1);
  EXPECT_EQ(file.metadata().at("step"), "12");
  std::vector<float> read(8, -1.f);
  file.read("w", read);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(same_bits(read[i], values[i])) << "element " << i;
  file.read("none", {});
}

TEST_F(Safetensors, Bf16IsRoundedToNearestEven) {
  const std::vector<float> values = {
      1.f, 1.00390625f /* half way, to even: down */, 1.01171875f /* half way: up */, -1.0040f, 3.4e38f, 1e-40f, -0.f};
  std::vector<float> many(700'000);  // more than one chunk
  for (size_t i = 0; i < many.size(); ++i) many[i] = std::sin(static_cast<float>(i));
  write_safetensors(
      dir_ / "a",
      {tensor_of("w", {7}, FloatFormat::bf16, values), tensor_of("many", {700'000}, FloatFormat::bf16, many)}, {});
  const SafetensorsFile file(dir_ / "a");
  EXPECT_EQ(file.tensors().at("w").dtype, "BF16");
  EXPECT_TRUE(file.metadata().empty());
  std::vector<float> read(7), read_many(many.size());
  file.read("w", read);
  EXPECT_EQ(read[1], 1.f);
  EXPECT_EQ(read[2], 1.015625f);
  EXPECT_EQ(read[3], -1.0078125f);
  EXPECT_EQ(read[4], std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(same_bits(read[i], bf16(values[i]))) << "element " << i;
  file.read("many", read_many);
  for (size_t i = 0; i < many.size(); ++i) ASSERT_EQ(read_many[i], float(bf16(many[i]))) << "element " << i;
}

TEST_F(Safetensors, HalvesAreReadExactly) {
  const std::vector<uint16_t> halves = {0x0000, 0x8000, 0x3c00, 0xc000, 0x7bff, 0x0001,
                                        0x03ff, 0x0400, 0x7c00, 0xfc00, 0x7e01};
  const std::string header = R"({"h":{"dtype":"F16","shape":[11],"data_offsets":[0,22]}})";
  const std::string data(reinterpret_cast<const char*>(halves.data()), 22);
  const SafetensorsFile file(write_bytes(length(header.size()) + header + data));
  std::vector<float> read(11);
  file.read("h", read);
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> expected = {0.f,      -0.f,     1.f,      -2.f, 65504.f, 0x1p-24f, 1023 * 0x1p-24f,
                                       0x1p-14f, infinity, -infinity};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(read[i], expected[i])) << "element " << i;
  EXPECT_TRUE(std::isnan(read[10]));
}

TEST_F(Safetensors, TheDataIsAlignedAndPaddedHeadersAreRead) {
  write_safetensors(dir_ / "a", {tensor_of("odd name \"\n", {1}, FloatFormat::f32, {1})}, {});
  std::ifstream stream(dir_ / "a", std::ios::binary);
  uint64_t header = 0;
  stream.read(reinterpret_cast<char*>(&header), 8);
  EXPECT_EQ(header % 8, 0u);
  EXPECT_EQ(SafetensorsFile(dir_ / "a").tensors().count("odd name \"\n"), 1u);
  EXPECT_EQ(fault("{}   ", 0), "(no fault)");
  EXPECT_EQ(fault(R"({"__metadata__":{}})", 0), "(no fault)");
}

TEST_F(Safetensors, OtherDtypesAreListedButNotReadAsFloats) {
  const SafetensorsFile file(write_raw(R"({"i":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},)"
                                       R"("f4":{"dtype":"F4","shape":[4],"data_offsets":[16,18]}})",
                                       18));
  EXPECT_EQ(file.tensors().at("i").size(), 2);
  std::vector<float> value(2);
  EXPECT_THROW(file.read("i", value), FileError);
  EXPECT_THROW(file.read("nothing", value), FileError);
}

TEST_F(Safetensors, ASpanOfAnotherSizeIsRefused) {
  write_safetensors(dir_ / "a", {tensor_of("w", {3}, FloatFormat::f32, {1, 2, 3})}, {});
  std::vector<float> value(4);
  EXPECT_THROW(SafetensorsFile(dir_ / "a").read("w", value), FileError);
}

TEST_F(Safetensors, EveryTruncationIsAFault) {
  write_safetensors(dir_ / "a",
                    {tensor_of("w", {3}, FloatFormat::f32, {1, 2, 3}), tensor_of("v", {2}, FloatFormat::bf16, {1, 2})},
                    {{"format", "pt"}});
  std::ifstream stream(dir_ / "a", std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(stream), {}};
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(fault_of(write_bytes(whole.substr(0, size))), "(no fault)") << size << " of " << whole.size() << " bytes";
  }
  EXPECT_NE(fault_of(write_bytes(whole + "x")).find("belong to no tensor"), std::string::npos);
  EXPECT_EQ(fault_of(write_bytes(whole)), "(no fault)");
}

TEST_F(Safetensors, NoChangedByteCrashes) {
  write_safetensors(dir_ / "a", {tensor_of("w", {3}, FloatFormat::f32, {1, 2, 3})}, {{"format", "pt"}});
  std::ifstream stream(dir_ / "a", std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(stream), {}};
  for (size_t i = 0; i + 12 < whole.size(); ++i) {
    for (const char c : {'\0', '"', '{', '[', '9', '-', ',', '\xff'}) {
      std::string changed = whole;
      changed[i] = c;
      fault_of(write_bytes(changed));  // a fault or not, but one sentence
    }
  }
}

TEST_F(Safetensors, AFileThatShrinksWhileItIsReadIsAFault) {
  write_safetensors(dir_ / "a", {tensor_of("w", {3}, FloatFormat::f32, {1, 2, 3})}, {});
  const SafetensorsFile file(dir_ / "a");
  fs::resize_file(dir_ / "a", fs::file_size(dir_ / "a") - 4);
  std::vector<float> value(3);
  EXPECT_THROW(file.read("w", value), FileError);
}

TEST_F(Safetensors, WhatIsNotARegularFileIsRefused) {
  EXPECT_NE(fault_of(dir_ / "absent").find("No such file"), std::string::npos);
  EXPECT_EQ(fault_of(dir_), "is not a regular file");
  ASSERT_EQ(mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(fault_of(dir_ / "pipe"), "is not a regular file");
}

TEST_F(Safetensors, HeaderLengthsAreBelievedOnlyIfTheyFit) {
  EXPECT_NE(fault_of(write_bytes(length(1000) + "{}")).find("only 2 follow"), std::string::npos);
  EXPECT_NE(fault_of(write_bytes(length(100'000'001) + "{}")).find("at most 100000000"), std::string::npos);
  EXPECT_NE(fault_of(write_bytes(length(~uint64_t{0}) + "{}")).find("at most"), std::string::npos);
  EXPECT_NE(fault_of(write_bytes(length(uint64_t{1} << 63) + "{}")).find("at most"), std::string::npos);
  EXPECT_NE(fault_of(write_bytes(length(0))).find("not valid JSON"), std::string::npos);
}

TEST_F(Safetensors, DeepNestingIsRefusedAtOnce) {
  const size_t deep = 20'000'000;
  EXPECT_NE(fault(std::string(deep, '['), 0).find("needs an object"), std::string::npos);
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  EXPECT_NE(fault(objects, 0), "(no fault)");
  EXPECT_NE(fault(R"({"a":{"shape":)" + std::string(deep, '['), 0).find("needs whole numbers"), std::string::npos);
}

struct Damage {
  const char* header;
  const char* says;
};

TEST_F(Safetensors, DamagedHeadersSayWhatIsWrong) {
  const std::string huge_rank = R"({"a":{"dtype":"U8","data_offsets":[0,4],"shape":[)" + [] {
    std::string ones = "1";
    for (int i = 0; i < 100; ++i) ones += ",1";
    return ones;
  }() + "]}}";
  const Damage damages[] = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"{} {}", "not valid JSON"},
      {"{\"\xff\":1}", "not valid JSON"},
      {"[]", "its header is a list; it needs an object"},
      {"null", "its header is null"},
      {"3", "its header is 3"},
      {R"({"a":3})", R"("a" in the header is 3; it needs an object)"},
      {R"({"a":[]})", R"("a" in the header is a list; it needs an object)"},
      {R"({"a":null})", R"("a" in the header is null)"},
      {R"({"a":{}})", R"(tensor "a" has no field "dtype")"},
      {R"({"a":{"dtype":"U8","shape":[4]}})", R"(tensor "a" has no field "data_offsets")"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,4]}})", R"(tensor "a" has no field "shape")"},
      {R"({"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}})", "has 8 as dtype; it needs a string"},
      {R"({"a":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}})", "has a list as dtype; it needs a string"},
      {R"({"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}})", "has 4 as shape; it needs a list of whole numbers"},
      {R"({"a":{"dtype":"U8","shape":"4","data_offsets":[0,4]}})", "has a string as shape"},
      {R"({"a":{"dtype":"U8","shape":{},"data_offsets":[0,4]}})", "has an object as shape"},
      {R"({"a":{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}})", "has a string in shape"},
      {R"({"a":{"dtype":"U8","shape":[true],"data_offsets":[0,4]}})", "has true in shape"},
      {R"({"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}})", "has 4.0 in shape"},
      {R"({"a":{"dtype":"U8","shape":[4e0],"data_offsets":[0,4]}})", "has 4e0 in shape"},
      {R"({"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}})", "has -4 in shape"},
      {R"({"a":{"dtype":"U8","shape":[[4]],"data_offsets":[0,4]}})", "has a list in shape"},
      {R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]}})", "9223372036854775808 in shape"},
      {R"({"a":{"dtype":"U8","shape":[99999999999999999999999],"data_offsets":[0,4]}})", "99999999999 in shape"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,9223372036854775808]}})", "in data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[-1,3]}})", "has -1 in data_offsets"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}})", "has 1 data_offsets; it needs 2"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}})", "has 3 data_offsets; it needs 2"},
      {R"({"a":{"dtype":"Q7","shape":[4],"data_offsets":[0,4]}})", R"(the unknown dtype "Q7")"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"extra":1}})", R"(a field "extra")"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})", R"(two fields "dtype")"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       R"("a" occurs twice)"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", "does not fit in 63 bits"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}})", "does not fit in 63 bits"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", "begins at byte 4 and ends before it, at 0"},
      {R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}})",
       "ends at byte 5 but the file has 4 bytes of tensors"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,9223372036854775807]}})", "ends at byte"},
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}})", "has 4 bytes; F32 [4] needs 16"},
      {R"({"a":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", "has 4 bytes; F4 [7] needs 4"},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
       R"(tensor "b" overlaps)"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       "overlaps"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
       R"(bytes 1 to 3 in front of tensor "b")"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "2 bytes at its end belong to no tensor"},
      {R"({"__metadata__":{"k":1}})", R"("k" in the header's metadata is 1; it needs a string)"},
      {R"({"__metadata__":{"k":{}}})", R"("k" in the header's metadata is an object)"},
      {R"({"__metadata__":{"k":"a","k":"b"}})", R"("k" occurs twice)"},
      {R"({"__metadata__":[]})", "__metadata__"},
      {R"({"__metadata__":{},"__metadata__":{}})", "occurs twice"},
      {huge_rank.c_str(), "more than 64 dimensions"},
  };
  for (const auto& [header, says] : damages) {
    const std::string message = fault(header, 4);
    EXPECT_NE(message.find(says), std::string::npos) << header << "\n  says: " << message << "\n  not: " << says;
  }
}

TEST_F(Safetensors, LongAndStrangeNamesStayOnOneShortLine) {
  const std::string name(100'000, 'n');
  fault("{\"" + name + "\":3}", 0);
  EXPECT_NE(fault(R"({"a\nb\u001b":3})", 0).find(R"(a\nb\u001b)"), std::string::npos);
}

TEST_F(Safetensors, AFullDeviceIsAFaultAndStaysADevice) {
  if (!fs::exists("/dev/full")) GTEST_SKIP();
  try {
    write_safetensors("/dev/full", {tensor_of("w", {1}, FloatFormat::f32, {1})}, {});
    FAIL();
  } catch (const FileError& error) {
    EXPECT_STREQ(error.what(), "/dev/full: cannot be written: No space left on device");
  }
  EXPECT_TRUE(fs::exists("/dev/full"));
}

TEST_F(Safetensors, AWritePastTheFileSizeLimitIsAFaultAndLeavesNothing) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    write_safetensors(dir_ / "a", {tensor_of("w", {1000}, FloatFormat::f32, std::vector<float>(1000))}, {});
  } catch (const FileError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(message.find("cannot be written: File too large"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(dir_ / "a"));
}

TEST_F(Safetensors, AFaultOfTheCallerLeavesNothingEither) {
  const TensorToWrite broken = {.name = "w", .shape = {1}, .fill = [](std::span<float>) { throw UsageError("no"); }};
  EXPECT_THROW(write_safetensors(dir_ / "a", {broken}, {}), UsageError);
  EXPECT_FALSE(fs::exists(dir_ / "a"));
  EXPECT_THROW(write_safetensors(dir_ / "absent" / "a", {}, {}), FileError);
  const TensorToWrite twice = tensor_of("w", {1}, FloatFormat::f32, {1});
  EXPECT_THROW(write_safetensors(dir_ / "a", {twice, twice}, {}), UsageError);
}

TEST_F(Safetensors, ARenameReplaces) {
  write_file(dir_ / "old", "old");
  write_file(dir_ / "new", "new");
  commit_rename(dir_ / "new", dir_ / "old");
  std::ifstream stream(dir_ / "old");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), "new");
  EXPECT_FALSE(fs::exists(dir_ / "new"));
  EXPECT_THROW(commit_rename(dir_ / "absent", dir_ / "old"), FileError);
}

}  // namespace
}  // namespace coda::train
