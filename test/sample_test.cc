#include "train/sample.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "coda/error.h"

namespace coda::train {
namespace {

std::string shown(const std::string& text) {
  std::vector<int32_t> bytes;
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return printable(bytes);
}

TEST(PrintableTest, TextStaysAsItIs) {
  for (const char* text : {"", "plain\n\ttext ~", "na\xc3\xafve", "\xe2\x82\xac", "\xf0\x9f\x99\x82"})
    EXPECT_EQ(shown(text), text);
}

TEST(PrintableTest, WhatATerminalCannotShowIsEscaped) {
  EXPECT_EQ(shown("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(shown("\r\x7f"), "\\x0d\\x7f");
  EXPECT_EQ(shown("\xc3"), "\\xc3");                    // cut off
  EXPECT_EQ(shown("\xc3("), "\\xc3(");                  // no continuation
  EXPECT_EQ(shown("\xe0\x80\x80"), "\\xe0\\x80\\x80");  // overlong
  EXPECT_EQ(shown("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // half a surrogate pair
  EXPECT_EQ(shown("\xc2\x9b"), "\\xc2\\x9b");           // a control character
  EXPECT_EQ(shown("\xff"), "\\xff");
}

class SampleTest : public ::testing::Test {
 protected:
  SampleTest() : model_(cpu_, config(), llama::Dtype::fp32) { model_.initialize(3); }
  static llama::Config config() {
    llama::Config c;
    c.vocab = 32;
    c.hidden = 16;
    c.layers = 1;
    c.heads = 1;
    c.kv_heads = 1;
    c.head_dim = 16;
    c.ffn = 16;
    c.max_positions = 12;
    return c;
  }
  /// The likeliest token after a context that is fed at once.
  int32_t likeliest(std::span<const int32_t> context) {
    llama::Decoder decoder(model_);
    const std::span<const float> logits = decoder.feed(context);
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }

  Cpu cpu_{1};
  llama::Model model_;
  const std::vector<int32_t> prompt_ = {1, 7, 3};
};

TEST_F(SampleTest, IsAFunctionOfItsSeed) {
  const SampleOptions options{.length = 9, .temperature = 1, .seed = 5};
  const std::vector<int32_t> first = sample(model_, prompt_, options);
  ASSERT_EQ(first.size(), 9u);
  EXPECT_EQ(sample(model_, prompt_, options), first);
  EXPECT_NE(sample(model_, prompt_, {.length = 9, .temperature = 1, .seed = 6}), first);
}

TEST_F(SampleTest, AFullContextStartsAgainFromItsLaterHalf) {
  // 12 positions: the 12th token fed fills them, then the last 6 are fed anew, and again 6 tokens later.
  const std::vector<int32_t> got = sample(model_, prompt_, {.length = 20, .temperature = 0});
  std::vector<int32_t> all = prompt_;
  int64_t seen = 0;
  for (int i = 0; i < 20; ++i) {
    seen = i == 0 ? 3 : seen == 12 ? 6 : seen + 1;
    all.push_back(likeliest(std::span<const int32_t>(all).last(static_cast<size_t>(seen))));
  }
  EXPECT_EQ(got, std::vector<int32_t>(all.begin() + 3, all.end()));
}

TEST_F(SampleTest, ALongPromptIsSeenFromItsEnd) {
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const std::vector<int32_t> got = sample(model_, prompt, {.length = 1, .temperature = 0, .context = 4});
  EXPECT_EQ(got, std::vector<int32_t>{likeliest(std::span<const int32_t>(prompt).last(4))});
}

TEST_F(SampleTest, Refuses) {
  EXPECT_THROW(sample(model_, {}, {}), UsageError);
  EXPECT_THROW(sample(model_, std::vector<int32_t>{32}, {}), UsageError);
  EXPECT_THROW(sample(model_, prompt_, {.length = -1}), UsageError);
  EXPECT_THROW(sample(model_, prompt_, {.temperature = -1}), UsageError);
  EXPECT_THROW(sample(model_, prompt_, {.context = -1}), UsageError);
}

}  // namespace
}  // namespace coda::train
