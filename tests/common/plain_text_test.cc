#include "common/plain_text.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(PlainText, WhatCommandsATerminalIsShownInstead) {
  EXPECT_EQ(EscapeControlText("\x1b]0;owned\a\x1b[2J"), "\\x1b]0;owned\\x07\\x1b[2J");
  EXPECT_EQ(EscapeControlText("a\tb\nc"), "a\tb\nc");
  EXPECT_EQ(EscapeControlText("50 %\r100 %"), "50 %\\x0d100 %");
  EXPECT_EQ(EscapeControlText("\x7f"), "\\x7f");
  EXPECT_EQ(EscapeControlText("\xc2\x9b"
                              "31m"),
            "\\x9b31m");  // CSI in one character of C1
  EXPECT_EQ(EscapeControlText("\x9b"
                              "31m"),
            "\\x9b31m");  // and as a byte that is not UTF-8
  EXPECT_EQ(EscapeControlText("\xe2\x80\xae"
                              "txt"),
            "\\u202etxt");
  EXPECT_EQ(EscapeControlText("Grüße ▕█▏ 東京"), "Grüße ▕█▏ 東京");
  EXPECT_EQ(EscapeControlText(std::string_view("\0x", 2)), "\\x00x");
}

TEST(PlainText, NamesHaveNoControls) {
  EXPECT_FALSE(HasControlText("node-1 ü"));
  EXPECT_TRUE(HasControlText("node\n"));
  EXPECT_TRUE(HasControlText("node\x1b"));
  EXPECT_TRUE(HasControlText("\xc2\x85"));
  EXPECT_TRUE(HasControlText("\xff"));
}

TEST(PlainText, LongTextsAreCutAtACharacter) {
  EXPECT_EQ(CutText("abcdef", 6), "abcdef");
  EXPECT_EQ(CutText("abcdefg", 6), "abc...");
  EXPECT_EQ(CutText("aüüüü", 6), "aü...");
  EXPECT_EQ(CutText("aüüüü", 5), "a...");
}

}  // namespace
}  // namespace ravel
