#include "train/data.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "coda/error.h"
#include "train/order.h"

namespace coda::train {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class DataTest : public ::testing::Test {
 protected:
  std::string write(const std::string& bytes) {
    const std::string path = testing::TempDir() + "coda_data_test_" + std::to_string(getpid());
    std::ofstream(path, std::ios::binary) << bytes;
    path_ = path;
    return path;
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::string path_;
};

template <class T>
std::vector<std::remove_const_t<T>> list(std::span<T> values) {
  return {values.begin(), values.end()};
}
using Tokens = std::vector<int32_t>;

std::string message_of(const auto& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(DataTest, BytesAreTokens) {
  const TokenFile file(write(std::string("ab\0\xff", 4)), TokenType::byte, 256);
  std::vector<int32_t> tokens(4);
  file.copy(0, tokens);
  EXPECT_EQ(tokens, (Tokens{'a', 'b', 0, 255}));
}

TEST_F(DataTest, IdsAreLittleEndian) {
  const std::string bytes("\x01\x02\x03\x00\x05\x00\x01\x00", 8);
  {
    const TokenFile file(write(bytes), TokenType::u16, 65536);
    std::vector<int32_t> tokens(2);
    file.copy(1, tokens);
    EXPECT_EQ(file.size(), 4);
    EXPECT_EQ(tokens, (Tokens{3, 5}));
  }
  const TokenFile file(path_, TokenType::u32, int64_t{1} << 31);
  std::vector<int32_t> tokens(2);
  file.copy(0, tokens);
  EXPECT_EQ(tokens, (Tokens{0x00030201, 0x00010005}));
}

TEST_F(DataTest, RefusesWhatCannotBeTokens) {
  const std::string path = write(std::string("\x01\x00\x07\x00\x02", 5));
  EXPECT_TRUE(contains(message_of([&] { TokenFile(path, TokenType::u16, 8); }), "5 bytes are not a multiple of 2"))
      << message_of([&] { TokenFile(path, TokenType::u16, 8); });
  std::filesystem::resize_file(path, 4);
  EXPECT_TRUE(
      contains(message_of([&] { TokenFile(path, TokenType::u16, 7); }), "token 1 is 7, but the vocabulary is 7"))
      << message_of([&] { TokenFile(path, TokenType::u16, 7); });
  EXPECT_TRUE(contains(message_of([&] { TokenFile(path, TokenType::u16, 8); }), "nothing"))
      << message_of([&] { TokenFile(path, TokenType::u16, 8); });
  EXPECT_TRUE(contains(message_of([&] { TokenFile(path + "_absent", TokenType::byte, 256); }), "No such file"))
      << message_of([&] { TokenFile(path + "_absent", TokenType::byte, 256); });
  EXPECT_TRUE(contains(message_of([&] { TokenFile(testing::TempDir(), TokenType::byte, 256); }), "regular file"))
      << message_of([&] { TokenFile(testing::TempDir(), TokenType::byte, 256); });
}

TEST_F(DataTest, APipeIsRefusedAndAFileThatIsCutShortIsAFault) {
  const std::string path = write("");
  std::filesystem::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(contains(message_of([&] { TokenFile(path, TokenType::byte, 256); }), "is not a regular file"));
  std::filesystem::remove(path);

  const TokenFile file(write(std::string(10'000, 'x')), TokenType::byte, 256);
  std::filesystem::resize_file(path, 100);
  std::vector<int32_t> tokens(10);
  file.copy(90, tokens);
  EXPECT_TRUE(contains(message_of([&] { file.copy(91, tokens); }), path + ": was cut short"));
}

TEST_F(DataTest, TheHashAndTheIdsOfALargeFileAreThoseOfItsParts) {
  std::string bytes(5'000'002, '\1');
  for (size_t i = 0; i < bytes.size(); i += 2) bytes[i] = static_cast<char>(i / 7), bytes[i + 1] = '\0';
  const std::string path = write(bytes);
  const TokenFile whole(path, TokenType::u16, 256);
  EXPECT_EQ(whole.hash(), 0xa9ca759a3fa278aeu);  // run.json of older runs has such hashes
  bytes[4'000'001] = '\1';
  write(bytes);
  EXPECT_TRUE(contains(message_of([&] { TokenFile(path, TokenType::u16, 256); }), "token 2000000 is "));
}

TEST_F(DataTest, RefusesLessThanAWindow) {
  const TokenFile file(write("12345678"), TokenType::byte, 256);
  EXPECT_TRUE(contains(message_of([&] { Windows(file, 0, 8, 8); }), "8 tokens are less than one window of --seq 8"))
      << message_of([&] { Windows(file, 0, 8, 8); });
  EXPECT_EQ(Windows(file, 0, 8, 7).count(), 1);
  EXPECT_TRUE(contains(message_of([&] { Windows(file, 5, 3, 4); }), "3 tokens in this part (of 8 in all)"))
      << message_of([&] { Windows(file, 5, 3, 4); });
  const TokenFile empty(write(""), TokenType::byte, 256);
  EXPECT_TRUE(contains(message_of([&] { Windows(empty, 0, 0, 1); }), "0 tokens"))
      << message_of([&] { Windows(empty, 0, 0, 1); });
}

TEST_F(DataTest, HashSeesEveryByteAndTheLength) {
  std::string bytes(37, 'x');
  const auto hash = [&] { return TokenFile(write(bytes), TokenType::byte, 256).hash(); };
  const uint64_t before = hash();
  EXPECT_EQ(hash(), before);
  for (char& c : bytes) {
    c = 'y';
    EXPECT_NE(hash(), before);
    c = 'x';
  }
  bytes = std::string(16, '\0');
  const uint64_t sixteen = hash();
  bytes += '\0';
  EXPECT_NE(hash(), sixteen);
}

TEST_F(DataTest, GathersWindowsAndTheirShiftedTargets) {
  const TokenFile file(write("0123456789"), TokenType::byte, 256);
  const Windows windows(file, 0, file.size(), 3);
  ASSERT_EQ(windows.count(), 3);
  Rows rows;
  rows.gather(windows, std::vector<int64_t>{2, 0}, std::nullopt);
  EXPECT_EQ(list(rows.batch().tokens), (Tokens{'6', '7', '8', '0', '1', '2'}));
  EXPECT_EQ(list(rows.batch().targets), (Tokens{'7', '8', '9', '1', '2', '3'}));
  EXPECT_EQ(list(rows.batch().document_starts), (std::vector<int64_t>{0, 3, 6}));
  EXPECT_EQ(rows.counted(), 6);
}

TEST_F(DataTest, SeparatorsEndDocuments) {
  const TokenFile file(write("a.bc.d..e"), TokenType::byte, 256);
  const Windows windows(file, 0, file.size(), 4);
  Rows rows;
  rows.gather(windows, std::vector<int64_t>{0, 1}, '.');
  // "a." "bc" | "." "d." "." : a separator belongs to the document that it ends.
  EXPECT_EQ(list(rows.batch().tokens), (Tokens{'a', '.', 'b', 'c', '.', 'd', '.', '.'}));
  EXPECT_EQ(list(rows.batch().targets), (Tokens{'.', -100, 'c', '.', -100, '.', -100, -100}));
  EXPECT_EQ(list(rows.batch().document_starts), (std::vector<int64_t>{0, 2, 4, 5, 7, 8}));
  EXPECT_EQ(rows.counted(), 4);
}

TEST(HoldoutTest, TakesTheEnd) {
  EXPECT_EQ(holdout_start(1000, 0.05), 950);
  EXPECT_EQ(holdout_start(1000, 0), 1000);
}

TEST(OrderTest, InOrderWrapsAround) {
  const Order order = Order::in_order(5);
  for (int64_t row = 0; row < 20; ++row) EXPECT_EQ(order.window(row), row % 5);
}

TEST(OrderTest, ShuffledReadsEveryWindowOnceAnEpoch) {
  for (const int64_t windows : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097}) {
    const Order order = Order::shuffled(windows, 7);
    std::vector<int> seen(static_cast<size_t>(windows));
    for (int64_t row = 0; row < 3 * windows; ++row) {
      const int64_t window = order.window(row);
      ASSERT_GE(window, 0);
      ASSERT_LT(window, windows);
      ASSERT_EQ(seen[static_cast<size_t>(window)]++, row / windows) << "windows " << windows << " row " << row;
    }
  }
}

TEST(OrderTest, SeedAndEpochChangeTheOrder) {
  const Order one = Order::shuffled(1000, 1), again = Order::shuffled(1000, 1), two = Order::shuffled(1000, 2);
  int same_seed = 0, same_epoch = 0, in_place = 0, neighbours = 0;
  for (int64_t row = 0; row < 1000; ++row) {
    ASSERT_EQ(one.window(row), again.window(row));
    same_seed += one.window(row) == two.window(row);
    same_epoch += one.window(row) == one.window(row + 1000);
    in_place += one.window(row) == row;
    neighbours += one.window(row) + 1 == one.window(row + 1);
  }
  // Of two random permutations one place agrees on average.
  EXPECT_LT(same_seed, 10);
  EXPECT_LT(same_epoch, 10);
  EXPECT_LT(in_place, 10);
  EXPECT_LT(neighbours, 10);
}

}  // namespace
}  // namespace coda::train
