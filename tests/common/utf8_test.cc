#include "common/utf8.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(Utf8, EveryCodePointSurvivesTheRoundTrip) {
  for (uint32_t point = 0; point <= 0x10FFFF; ++point) {
    if (point >= 0xD800 && point < 0xE000) {
      continue;
    }
    std::string text;
    AppendUtf8(point, text);
    const DecodedCharacter back = DecodeUtf8(text, 0);
    ASSERT_EQ(back.code_point, point);
    ASSERT_EQ(static_cast<std::size_t>(back.bytes), text.size());
  }
}

TEST(Utf8, WhatIsNotUtf8IsFound) {
  for (const char* bad : {"\x80",
                          "\xC0\x80",
                          "\xC3",
                          "\xE2\x82",
                          "\xED\xA0\x80",
                          "\xF4\x90\x80\x80",
                          "\xF8\x88\x80\x80\x80",
                          "\xFF"}) {
    EXPECT_EQ(FindInvalidUtf8(std::string("ab") + bad), 2u) << bad;
  }
  EXPECT_EQ(FindInvalidUtf8("a\u00e9\u4f60\U0001F642"), std::string_view::npos);
}

TEST(Utf8, EachBadByteIsReplacedOnce) {
  EXPECT_EQ(ReplaceInvalidUtf8("a\xE2\x82z"), "a\xEF\xBF\xBD\xEF\xBF\xBDz");
  EXPECT_EQ(ReplaceInvalidUtf8(""), "");
}

}  // namespace
}  // namespace ravel
