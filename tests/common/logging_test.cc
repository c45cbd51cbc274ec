#include "common/logging.h"

#include <algorithm>
#include <functional>

#include <gtest/gtest.h>

#include "common/json.h"

namespace ravel::log {
namespace {

std::string Logged(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Logging, EachLineIsAJsonObjectWithTheFieldsOfTheProcess) {
  Init("ravel-test", Format::kJson, Level::kInfo);
  SetField("rank", "3");
  const std::string text = Logged([] { Warning("two\nlines \"quoted\""); });
  SetField("rank", "");
  ASSERT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  const absl::StatusOr<json::Value> line = json::Parse(text);
  ASSERT_TRUE(line.ok()) << text;
  EXPECT_EQ(line->Find("level")->AsString(), "warning");
  EXPECT_EQ(line->Find("program")->AsString(), "ravel-test");
  EXPECT_EQ(line->Find("rank")->AsString(), "3");
  EXPECT_EQ(line->Find("message")->AsString(), "two\nlines \"quoted\"");
  EXPECT_EQ(line->Find("time")->AsString().size(), 24u);
}

TEST(Logging, LinesBelowTheLevelAreDropped) {
  Init("ravel-test", Format::kJson, Level::kWarning);
  EXPECT_EQ(Logged([] { Info("hidden"); }), "");
}

TEST(Logging, PeopleGetPlainLines) {
  Init("ravelctl", Format::kConsole, Level::kInfo);
  EXPECT_EQ(Logged([] { Info("ready"); }), "ravelctl: ready\n");
  EXPECT_EQ(Logged([] { Error("no"); }), "ravelctl: error: no\n");
}

}  // namespace
}  // namespace ravel::log
