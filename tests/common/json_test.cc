#include "common/json.h"

#include <limits>

#include <gtest/gtest.h>

namespace ravel::json {
namespace {

TEST(Json, TextRoundTripsWithItsOrder) {
  const std::string text =
      R"({"z":[1,-2,18446744073709551615],"a":{"b":null,"c":true},"s":"q\"\\\n\u0001é","d":0.1})";
  const absl::StatusOr<Value> value = Parse(text);
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(Serialize(*value), text);
  EXPECT_TRUE(value->Find("z")->AsArray()[2].is_uint());
  EXPECT_EQ(value->Find("nothing"), nullptr);
}

TEST(Json, DoublesKeepEveryBitAndStayDoubles) {
  for (const double number : {0.1, 1.0, -3e-300, 1e300, 5e-324, 123456789.125}) {
    const absl::StatusOr<Value> back = Parse(Serialize(Value(number)));
    ASSERT_TRUE(back.ok());
    EXPECT_FALSE(back->is_int()) << number;
    EXPECT_EQ(back->AsDouble(), number);
  }
  EXPECT_EQ(Serialize(Value(1.0)), "1.0");
  EXPECT_EQ(Serialize(Value(std::numeric_limits<double>::infinity())), "null");
}

TEST(Json, FloatsPrintWithTheirOwnDigits) {
  EXPECT_EQ(Serialize(Value::FromFloat(2.3f)), "2.3");
  for (const float number : {0.1f, 5.5451775f, 1e-40f, 3.4e38f}) {
    EXPECT_EQ(static_cast<float>(Parse(Serialize(Value::FromFloat(number)))->AsDouble()), number);
  }
}

TEST(Json, DoublesAreThoseOfTheirDigits) {
  for (const double number :
       {0.9500000011132214, 0.1, 1e-320, 1.7976931348623157e308, 9e15, 1e23}) {
    EXPECT_EQ(Parse(Serialize(Value(number)))->AsDouble(), number) << number;
    EXPECT_EQ(Parse(Serialize(Value(Array{number, 1})))->AsArray()[0].AsDouble(), number);
  }
  EXPECT_EQ(Parse("1E+2")->AsDouble(), 100);
  EXPECT_TRUE(Parse("-7")->is_int());
  EXPECT_FALSE(Parse("1e999").ok());
  EXPECT_FALSE(Parse("[-1e999]").ok());
}

TEST(Json, OfEqualNamesTheLastCounts) {
  EXPECT_EQ(Serialize(*Parse(R"({"a":1,"b":{"c":[],"c":2},"a":[3],"a":4})")),
            R"({"a":4,"b":{"c":2}})");
}

TEST(Json, ErrorsSayWhereTheyAre) {
  const auto message = [](std::string_view text) {
    return std::string(Parse(text).status().message());
  };
  EXPECT_EQ(message("{\n  \"a\": x}").substr(0, 17), "line 2, column 8:");
  EXPECT_NE(message("{\"a\": 1").find("incomplete"), std::string::npos);
  EXPECT_NE(message("1 2").find("after the end"), std::string::npos);
  EXPECT_FALSE(Parse("").ok());
  EXPECT_FALSE(Parse(std::string(100, '[')).ok());  // deeper than the limit, not a crash
}

TEST(Json, AMemberOfTheOutermostObjectIsFoundWithoutKeepingAnything) {
  const auto has = [](std::string_view text) { return CheckHasObject(text, "model").ok(); };
  EXPECT_TRUE(has(R"({"version": "1.0", "a": [{"model": 1}], "model": {"type": "BPE"}})"));
  EXPECT_TRUE(has(R"({"mo\u0064el": {}})"));
  EXPECT_TRUE(has(R"({"model": 1, "model": {}})")) << "of equal names the last counts";
  for (const char* text : {R"({})",
                           R"({"model": "x"})",
                           R"({"model": []})",
                           R"({"model": {}, "model": null})",
                           R"({"models": {}})",
                           R"({"a": {"model": {}}})",
                           R"([{"model": {}}])",
                           R"(["model", {}])",
                           R"({"model": {})",
                           R"({"model": {}} x)",
                           R"("model")",
                           ""}) {
    EXPECT_FALSE(has(text)) << text;
  }
  const std::string long_key = R"({")" + std::string(100'000, 'm') + R"(": 1, "model": {"x": 1}})";
  EXPECT_TRUE(has(long_key));
  EXPECT_FALSE(has(R"({"model": )" + std::string(100, '[') + std::string(100, ']') + "}"));
}

TEST(Json, InvalidUtf8IsReplacedInOutput) {
  EXPECT_EQ(Serialize(Value("a\xff"
                            "b")),
            "\"a\xEF\xBF\xBD"
            "b\"");
}

TEST(Json, PrettyTextIndentsObjectsAndKeepsScalarListsOnOneLine) {
  Value value;
  value.Set("list", Value(Array{1, 2}));
  value.Set("deep", Value(Array{Value().Set("x", 1)}));
  EXPECT_EQ(SerializePretty(value),
            "{\n  \"list\": [1, 2],\n  \"deep\": [\n    {\n      \"x\": 1\n    }\n  ]\n}");
}

TEST(Json, SetReplacesAndAppendAdds) {
  Value value;
  value.Set("a", 1).Set("a", 2);
  EXPECT_EQ(Serialize(value), "{\"a\":2}");
  Value list;
  list.Append("x").Append(false);
  EXPECT_EQ(Serialize(list), "[\"x\",false]");
}

}  // namespace
}  // namespace ravel::json
