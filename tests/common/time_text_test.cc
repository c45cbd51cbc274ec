#include "common/time_text.h"

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(TimeText, DurationsAreReadInTheirUnits) {
  const std::pair<const char*, int64_t> kCases[] = {{"90s", 90000},
                                                    {"20m", 1200000},
                                                    {"14d", 1209600000},
                                                    {"1h30m", 5400000},
                                                    {"0.5s", 500},
                                                    {"250ms", 250},
                                                    {"0", 0},
                                                    {"0s", 0},
                                                    {"1.5h", 5400000}};
  for (const auto& [text, expected] : kCases) {
    ASSERT_TRUE(ParseDurationMs(text).ok()) << text;
    EXPECT_EQ(*ParseDurationMs(text), expected) << text;
  }
}

TEST(TimeText, WhatIsNoDurationIsNamed) {
  for (const char* text :
       {"", "5", "s", "-5s", "5 s", "5x", "5s!", "1e3s", "nan", "inf", "99999999999999d", ".5s"}) {
    EXPECT_FALSE(ParseDurationMs(text).ok()) << text;
  }
  EXPECT_EQ(ParseDurationMs("5x").status().message(),
            "expected a duration such as 90s, 20m, 1h30m or 14d, got '5x'");
}

TEST(TimeText, ExactDurationsReadBack) {
  for (const int64_t ms : {0LL, 1LL, 999LL, 1000LL, 90000LL, 5400000LL, 1209600001LL}) {
    EXPECT_EQ(*ParseDurationMs(FormatDurationExact(ms)), ms) << FormatDurationExact(ms);
  }
  EXPECT_EQ(FormatDurationExact(5400000), "1h30m");
}

TEST(TimeText, PeopleSeeTwoUnits) {
  EXPECT_EQ(FormatDuration(250), "250ms");
  EXPECT_EQ(FormatDuration(1500), "1.5s");
  EXPECT_EQ(FormatDuration(42000), "42s");
  EXPECT_EQ(FormatDuration(185000), "3m5s");
  EXPECT_EQ(FormatDuration(7 * 86400000LL + 5 * 3600000LL), "7d5h");
}

TEST(TimeText, SizesAreReadInTheirUnits) {
  EXPECT_EQ(*ParseBytes("4096"), 4096);
  EXPECT_EQ(*ParseBytes("512MiB"), 512LL << 20);
  EXPECT_EQ(*ParseBytes("1.5GiB"), 3LL << 29);
  EXPECT_EQ(*ParseBytes("2GB"), 2000000000);
  for (const char* text : {"", "GiB", "-1", "1 GiB", "1XB", "99999999TiB"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(512), "512 B");
}

TEST(TimeText, TimesAreRfc3339InUtc) {
  EXPECT_EQ(FormatTime(1767225600123), "2026-01-01T00:00:00.123Z");
  EXPECT_EQ(FormatTime(-1), "1969-12-31T23:59:59.999Z");
}

}  // namespace
}  // namespace ravel
