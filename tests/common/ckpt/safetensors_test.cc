#include "common/ckpt/safetensors.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::ckpt {
namespace {

using ::testing::HasSubstr;

std::string WithLength(const std::string& json) {
  std::string header;
  for (int byte = 0; byte < 8; ++byte) {
    header.push_back(static_cast<char>((json.size() >> (8 * byte)) & 0xffu));
  }
  return header + json;
}

absl::StatusOr<SafetensorsFile> Parse(const std::string& json, int64_t data_bytes) {
  const std::string header = WithLength(json);
  return ParseSafetensorsHeader(header, static_cast<int64_t>(header.size()) + data_bytes);
}

std::vector<SafetensorsEntry> SomeEntries() {
  std::vector<SafetensorsEntry> entries = {
      {.key = "b", .dtype = DType::kBF16, .shape = {3}, .saved_offset = {7}},
      {.key = "a\"\\\n\xc3\xa9", .dtype = DType::kF32, .shape = {2, 3}, .saved_offset = {4, 0}},
      {.key = "step", .dtype = DType::kF32, .shape = {}, .saved_offset = {}}};
  std::sort(entries.begin(), entries.end(), SafetensorsOrder);
  PlaceSafetensorsEntries(entries);
  return entries;
}

TEST(SafetensorsTest, WhatIsWrittenIsReadBack) {
  const std::vector<SafetensorsEntry> entries = SomeEntries();
  const std::string header = SafetensorsHeader(entries);
  EXPECT_EQ(header.size() % 4096, 0u);
  EXPECT_EQ(static_cast<int64_t>(header.size()), SafetensorsHeaderBytes(entries));
  const auto file =
      ParseSafetensorsHeader(header, static_cast<int64_t>(header.size()) + entries.back().end);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->header_bytes, static_cast<int64_t>(header.size()));
  ASSERT_EQ(file->entries.size(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(file->entries[i].key, entries[i].key);
    EXPECT_EQ(file->entries[i].dtype, entries[i].dtype);
    EXPECT_EQ(file->entries[i].shape, entries[i].shape);
    EXPECT_EQ(file->entries[i].saved_offset, entries[i].saved_offset);
    EXPECT_EQ(file->entries[i].begin, entries[i].begin);
  }
}

TEST(SafetensorsTest, LargerElementsComeFirst) {
  const std::vector<SafetensorsEntry> entries = SomeEntries();
  EXPECT_EQ(entries[0].dtype, DType::kF32);
  EXPECT_EQ(entries.back().key, "b");
}

TEST(SafetensorsTest, HeaderText) {
  std::vector<SafetensorsEntry> entries = {
      {.key = "w", .dtype = DType::kF32, .shape = {2, 3}, .saved_offset = {4, 0}}};
  PlaceSafetensorsEntries(entries);
  const std::string header = SafetensorsHeader(entries);
  const std::string expected =
      R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"__metadata__":{"format":"pt","DCP_VERSION":"1.0",)"
      R"("DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[4,0]}}"}})";
  EXPECT_EQ(header.substr(8, expected.size()), expected);
  EXPECT_EQ(header.find_first_not_of(' ', 8 + expected.size()), std::string::npos);
}

TEST(SafetensorsTest, ExportHeaderHasNoShardingInformation) {
  std::vector<SafetensorsEntry> entries = {
      {.key = "w", .dtype = DType::kF32, .shape = {2}, .saved_offset = {}}};
  PlaceSafetensorsEntries(entries);
  EXPECT_THAT(SafetensorsExportHeader(entries), HasSubstr(R"("__metadata__":{"format":"pt"}})"));
}

struct Accepted {
  const char* name;
  std::string json;
  int64_t data_bytes;
};
void PrintTo(const Accepted& value, std::ostream* out) {
  *out << value.name;
}

class SafetensorsAcceptTest : public ::testing::TestWithParam<Accepted> {};

TEST_P(SafetensorsAcceptTest, IsRead) {
  const auto file = Parse(GetParam().json, GetParam().data_bytes);
  EXPECT_TRUE(file.ok()) << file.status();
}

INSTANTIATE_TEST_SUITE_P(
    Corpus,
    SafetensorsAcceptTest,
    ::testing::Values(
        Accepted{"empty", "{}", 0},
        Accepted{"trailing spaces", "{}      ", 0},
        Accepted{"one", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4},
        Accepted{
            "any order",
            R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]},"a":{"data_offsets":[0,4],"dtype":"F32","shape":[]}})",
            5},
        Accepted{"no elements", R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})", 0},
        Accepted{"huge beside zero",
                 R"({"a":{"dtype":"F32","shape":[9223372036854775807,0],"data_offsets":[0,0]}})",
                 0},
        Accepted{
            "metadata",
            R"({"__metadata__":{"format":"pt","x":"é\n"},"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})",
            8},
        Accepted{"white space",
                 "{ \"a\" : {\t\"dtype\":\"F8_E4M3\",\n\"shape\":[2],\"data_offsets\":[0, 2]} }",
                 2},
        Accepted{"surrogates",
                 R"({"\ud83d\ude00":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})",
                 1}));

struct Rejected {
  const char* name;
  std::string json;
  int64_t data_bytes;
  const char* message;
};
void PrintTo(const Rejected& value, std::ostream* out) {
  *out << value.name;
}

class SafetensorsRejectTest : public ::testing::TestWithParam<Rejected> {};

TEST_P(SafetensorsRejectTest, IsRefusedWithItsReason) {
  const auto file = Parse(GetParam().json, GetParam().data_bytes);
  ASSERT_FALSE(file.ok());
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(GetParam().message));
}

const char kTwo[] =
    R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]},"b":{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}})";
std::string Two(int a, int b, int c, int d) {
  char text[256];
  std::snprintf(text, sizeof(text), kTwo, a, b, c, d);
  return text;
}

INSTANTIATE_TEST_SUITE_P(
    Corpus,
    SafetensorsRejectTest,
    ::testing::Values(
        Rejected{"hole", Two(0, 2, 3, 5), 5, "key \"b\": data begin at 3, expected 2 (a hole)"},
        Rejected{"hole at the start",
                 Two(1, 3, 3, 5),
                 5,
                 "key \"a\": data begin at 1, expected 0 (a hole)"},
        Rejected{
            "overlap", Two(0, 2, 1, 3), 3, "key \"b\": data begin at 1, expected 2 (an overlap)"},
        Rejected{"same bytes", Two(0, 2, 0, 2), 2, "an overlap"},
        Rejected{"trailing bytes", Two(0, 2, 2, 4), 5, "entries end at 4 but the file has 5"},
        Rejected{"beyond the end", Two(0, 2, 2, 4), 3, "entries end at 4 but the file has 3"},
        Rejected{
            "backwards", Two(2, 0, 2, 4), 4, "key \"a\": data_offsets [2, 0] do not fit U8 [2]"},
        Rejected{"size", Two(0, 3, 3, 5), 5, "key \"a\": data_offsets [0, 3] do not fit U8 [2]"},
        Rejected{
            "repeated key",
            R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
            0,
            "key \"a\": appears twice"},
        Rejected{"repeated field",
                 R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                 0,
                 "field \"dtype\" appears twice"},
        Rejected{"leading space",
                 R"( {"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                 1,
                 "must begin with '{'"},
        Rejected{"sub-byte dtype",
                 R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})",
                 1,
                 "dtype \"F4\" is not supported"},
        Rejected{"E8M0",
                 R"({"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}})",
                 1,
                 "dtype \"F8_E8M0\" is not supported"},
        Rejected{"unknown field",
                 R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})",
                 1,
                 "unknown field \"stride\""},
        Rejected{"missing field",
                 R"({"a":{"dtype":"U8","shape":[1]}})",
                 1,
                 "key \"a\": expected dtype, shape and two data_offsets"},
        Rejected{"overflow",
                 R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
                 0,
                 "do not fit"},
        Rejected{"nine dimensions",
                 R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})",
                 1,
                 "at most 8 numbers"},
        Rejected{"negative",
                 R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})",
                 1,
                 "expected a whole number"},
        Rejected{"fraction",
                 R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})",
                 1,
                 "expected"},
        Rejected{"leading zero",
                 R"({"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}})",
                 1,
                 "expected a whole number"},
        Rejected{"number above 2^63",
                 R"({"a":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}})",
                 1,
                 "below 2^63"},
        Rejected{"metadata of numbers", R"({"__metadata__":{"x":1}})", 0, "expected a string"},
        Rejected{"text after the end", R"({} x)", 0, "only spaces after the closing brace"},
        Rejected{"trailing comma",
                 R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},})",
                 1,
                 "expected a string"},
        Rejected{"lone surrogate",
                 R"({"\ud83d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                 1,
                 "surrogate"},
        Rejected{"not UTF-8",
                 "{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                 1,
                 "UTF-8"},
        Rejected{"control character",
                 "{\"a\nb\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                 1,
                 "control character"},
        Rejected{"cut off", R"({"a":{"dtype":"U8","sha)", 1, "expected"},
        Rejected{
            "sharding of another key",
            R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"b\":{\"saved_offsets\":[0]}}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
            1,
            "DCP_SHARDING_INFO does not fit"},
        Rejected{
            "sharding without a key",
            R"({"__metadata__":{"DCP_SHARDING_INFO":"{}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
            1,
            "does not list every key"}));

TEST(SafetensorsTest, AHugeLengthIsRefusedBeforeAnythingIsAllocated) {
  const std::string header("\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
  const auto bytes = SafetensorsJsonBytes(header, 100);
  EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("expected 2 to"));
}

TEST(SafetensorsTest, AHeaderBeyondTheFileIsRefused) {
  const std::string header = WithLength(std::string(50, ' '));
  EXPECT_FALSE(SafetensorsJsonBytes(header, 57).ok());
  EXPECT_FALSE(SafetensorsJsonBytes("1234567", 7).ok());
}

TEST(SafetensorsTest, EveryCutHeaderIsRefused) {
  const std::vector<SafetensorsEntry> entries = SomeEntries();
  const std::string whole = SafetensorsHeader(entries);
  const size_t end = whole.find_last_not_of(' ') + 1;
  for (size_t length = 0; length < end - 8; ++length) {
    const std::string header = WithLength(whole.substr(8, length));
    EXPECT_FALSE(
        ParseSafetensorsHeader(header, static_cast<int64_t>(header.size()) + entries.back().end)
            .ok())
        << length;
  }
}

}  // namespace
}  // namespace ravel::ckpt
