#include "train/sample.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace coda::train
