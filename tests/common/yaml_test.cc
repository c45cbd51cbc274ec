#include "common/yaml.h"

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

namespace ravel::yaml {
namespace {

std::string ErrorOf(const std::string& text) {
  ParseError error;
  const absl::StatusOr<Node> root = Parse(text, &error);
  return root.ok()
             ? "ok"
             : absl::StrCat(error.position.line, ":", error.position.column, " ", error.message);
}

TEST(Yaml, KeepsPositionsTextAndOrder) {
  const absl::StatusOr<Node> root = Parse("b: no\na: [1.0, 'x']\nc: |\n  two\n  lines\n", nullptr);
  ASSERT_TRUE(root.ok()) << root.status();
  ASSERT_EQ(root->entries.size(), 3u);
  EXPECT_EQ(root->entries[0].name, "b");
  EXPECT_EQ(root->entries[0].value.text, "no");
  EXPECT_FALSE(root->entries[0].value.quoted);
  EXPECT_EQ(root->entries[1].position.line, 2);
  EXPECT_EQ(root->entries[1].value.elements[1].position.column, 10);
  EXPECT_TRUE(root->entries[1].value.elements[1].quoted);
  EXPECT_EQ(root->entries[2].value.text, "two\nlines\n");
}

TEST(Yaml, JsonIsReadTheSameWay) {
  const absl::StatusOr<Node> root = Parse("{\"a\": [1, null, {\"b\": \"x\\ny\"}]}", nullptr);
  ASSERT_TRUE(root.ok()) << root.status();
  const Node& list = root->entries[0].value;
  EXPECT_EQ(list.elements[1].kind, NodeKind::kNull);
  EXPECT_EQ(list.elements[2].entries[0].value.text, "x\ny");
}

TEST(Yaml, DuplicateKeysStayForTheReaderToName) {
  const absl::StatusOr<Node> root = Parse("a: 1\na: 2\n", nullptr);
  ASSERT_TRUE(root.ok());
  EXPECT_EQ(root->entries.size(), 2u);
}

TEST(Yaml, AnchorsAreExpandedWithinLimits) {
  const absl::StatusOr<Node> root = Parse("a: &x {k: 1}\nb: *x\n", nullptr);
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->entries[1].value.entries[0].value.text, "1");

  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int level = 1; level < 12; ++level) {
    absl::StrAppend(&bomb, "a", level, ": &a", level, " [");
    for (int i = 0; i < 10; ++i) {
      absl::StrAppend(&bomb, i > 0 ? ", " : "", "*a", level - 1);
    }
    bomb += "]\n";
  }
  EXPECT_NE(ErrorOf(bomb).find("too large"), std::string::npos);

  std::string many = "a: &a 1\nb: [";
  for (int i = 0; i < 1001; ++i) {
    many += "*a, ";
  }
  EXPECT_NE(ErrorOf(many + "1]").find("at most 1000 aliases"), std::string::npos);
}

TEST(Yaml, RefusesWhatIsNotOnePlainDocument) {
  EXPECT_NE(ErrorOf("a: [1\nb: 2").find(":"), std::string::npos);
  EXPECT_NE(ErrorOf("").find("empty"), std::string::npos);
  EXPECT_NE(ErrorOf("a: 1\n---\nb: 2\n").find("expected one document"), std::string::npos);
  EXPECT_NE(ErrorOf(std::string(5000, '[')).find("at most 32 levels"), std::string::npos);
  EXPECT_NE(ErrorOf("a: !!python/object:os.system x").find("tags are not allowed"),
            std::string::npos);
  EXPECT_NE(ErrorOf("a: !custom x").find("tags are not allowed"), std::string::npos);
  EXPECT_NE(ErrorOf("a: &x {b: 1}\nc: {<<: *x}\n").find("merge keys"), std::string::npos);
  EXPECT_NE(ErrorOf(std::string(kMaxBytes + 1, ' ')).find("at most 1048576 bytes"),
            std::string::npos);
  EXPECT_NE(ErrorOf(std::string("a: \0b", 5)).find("binary"), std::string::npos);
  EXPECT_NE(ErrorOf("a: 1\nb: \xC3\xA9\xFFy").find("2:5 expected UTF-8, got the byte 0xff"),
            std::string::npos);
  EXPECT_EQ(ErrorOf("a: \xC3\xA9"), "ok");
  EXPECT_NE(ErrorOf("a: &x [*x]"), "ok");
  EXPECT_NE(ErrorOf("a: *nowhere"), "ok");
  EXPECT_NE(ErrorOf("? [complex]\n: 1"), "ok");
}

}  // namespace
}  // namespace ravel::yaml
