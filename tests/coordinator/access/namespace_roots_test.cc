#include "coordinator/access/namespace_roots.h"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr char kTwoTeams[] = R"(
namespaces:
  team-a:
    read: [/data/team-a/, /models]
    write: [/checkpoints/team-a, 'ravel://store:7080/team-a/', 's3://bucket/team-a']
  team-b:
    write: ['file:///checkpoints/team-b']
)";

NamespaceRoots Roots(const std::string& text = kTwoTeams) {
  absl::StatusOr<NamespaceRoots> roots = NamespaceRoots::Parse(text);
  EXPECT_TRUE(roots.ok()) << roots.status();
  return *std::move(roots);
}

void ExpectAllowed(const NamespaceRoots& roots,
                   const std::string& name,
                   const std::string& path,
                   PathUse use,
                   bool allowed) {
  EXPECT_EQ(roots.Expected(name, path, use).empty(), allowed) << name << " " << path;
}

TEST(NamespaceRootsTest, ANamespaceHasItsOwnRootsAlone) {
  const NamespaceRoots roots = Roots();
  ExpectAllowed(roots, "team-a", "/data/team-a/tokens", PathUse::kRead, true);
  ExpectAllowed(roots, "team-a", "/data/team-a", PathUse::kWrite, false);
  ExpectAllowed(roots, "team-a", "/checkpoints/team-a/x", PathUse::kWrite, true);
  ExpectAllowed(roots, "team-a", "file:///checkpoints/team-a/x", PathUse::kWrite, true);
  ExpectAllowed(roots, "team-a", "/checkpoints/team-a/x", PathUse::kRead, true);
  ExpectAllowed(roots, "team-a", "/checkpoints/team-b/x", PathUse::kRead, false);
  ExpectAllowed(roots, "team-a", "/data/team-ab", PathUse::kRead, false);
  ExpectAllowed(roots, "team-b", "/checkpoints/team-b", PathUse::kWrite, true);
  ExpectAllowed(roots, "team-b", "/checkpoints/team-a", PathUse::kWrite, false);
  ExpectAllowed(roots, "team-b", "/data/team-a/tokens", PathUse::kRead, false);
  ExpectAllowed(roots, "team-a", "/data/team-a/../team-b", PathUse::kRead, false);
  ExpectAllowed(roots, "team-a", "data/team-a", PathUse::kRead, false);
}

TEST(NamespaceRootsTest, StoresAreComparedByHostAndName) {
  const NamespaceRoots roots = Roots();
  for (const char* good : {"ravel://store:7080/team-a", "ravel://store:7080/team-a/x/y/"}) {
    ExpectAllowed(roots, "team-a", good, PathUse::kWrite, true);
    ExpectAllowed(roots, "team-b", good, PathUse::kWrite, false);
  }
  ExpectAllowed(roots, "team-a", "s3://bucket/team-a/x", PathUse::kWrite, true);
  for (const char* bad : {"ravel://store:7081/team-a",
                          "ravel://store:7080/team-ab",
                          "ravel://store:7080/team-b",
                          "ravel://store:7080/",
                          "ravel://other/team-a",
                          "s3://bucket/team-b",
                          "s3://bucket2/team-a",
                          "ravel://store:7080/team-a/../team-b",
                          "ravel://store:7080/team-a//x",
                          "ravel://store:7080/team-a/..%2fteam-b",
                          "ravel://store:7080/team-a/%2e%2e/team-b",
                          "s3://bucket/team-a/./x",
                          "http://store:7080/team-a",
                          "ravel://"}) {
    ExpectAllowed(roots, "team-a", bad, PathUse::kWrite, false);
  }
}

TEST(NamespaceRootsTest, ANamespaceWithoutAnEntryHasThoseOfTheStarOrNone) {
  ExpectAllowed(Roots(), "team-c", "/models/m", PathUse::kRead, false);
  EXPECT_THAT(Roots().Expected("team-c", "/models/m", PathUse::kRead), HasSubstr("allows it none"));
  const NamespaceRoots open = Roots("namespaces: {'*': {read: [/models]}, team-a: {write: [/a]}}");
  ExpectAllowed(open, "team-c", "/models/m", PathUse::kRead, true);
  ExpectAllowed(open, "team-c", "/models/m", PathUse::kWrite, false);
  ExpectAllowed(open, "team-a", "/models/m", PathUse::kRead, false);
  EXPECT_THAT(open.Expected("team-c", "/etc/passwd", PathUse::kRead),
              HasSubstr("namespace team-c may read, beneath /models"));
}

TEST(NamespaceRootsTest, FoldersAreThoseOfTheRootsThatAreNoServices) {
  EXPECT_EQ(Roots().FoldersOf("team-a").write, std::vector<std::string>({"/checkpoints/team-a"}));
}

TEST(NamespaceRootsTest, EveryFaultHasItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "expected a document"},
      {"[a]", "namespaces"},
      {"roots: {}", "namespaces"},
      {"namespaces: {}\nmore: 1", "namespaces"},
      {"namespaces:\n  a: [/x]", "2:6: expected read and write"},
      {"namespaces:\n  a: {reed: [/x]}", "2:7: expected read and write, each once, got reed"},
      {"namespaces:\n  a: {read: [/x], read: [/y]}", "each once"},
      {"namespaces:\n  a: {read: /x}", "2:13: expected a list"},
      {"namespaces:\n  a: {read: [x]}", "2:14: expected an absolute path"},
      {"namespaces:\n  a: {read: [/x/../y]}", "without '..'"},
      {"namespaces:\n  a: {write: ['s3://']}", "expected a URL"},
      {"namespaces:\n  a: {write: ['s3://b/../c']}", "expected a URL"},
      {"namespaces:\n  a: {read: [[/x]]}", "expected a path"},
      {"namespaces:\n  a: {}\n  a: {}", "3:3: namespace 'a'"},
      {"namespaces: {", ""}};
  for (const auto& [text, message] : cases) {
    const absl::Status status = NamespaceRoots::Parse(text).status();
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << text;
  }
}

TEST(NamespaceRootsFileTest, AFileIsReadAgainWhenItChangesAndABadOneChangesNothing) {
  testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/roots.yaml";
  EXPECT_FALSE(NamespaceRootsFile::Open(path).ok());
  testing::WriteText(path, "namespaces: [");
  EXPECT_THAT(std::string(NamespaceRootsFile::Open(path).status().message()),
              HasSubstr(path + ":"));
  testing::WriteText(path, "namespaces: {a: {read: [/x]}}");
  const auto file = NamespaceRootsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectAllowed(*(*file)->Get(), "a", "/x/y", PathUse::kRead, true);
  testing::WriteText(path, "namespaces: {a: {read: [/z]}}");
  (*file)->Refresh();
  ExpectAllowed(*(*file)->Get(), "a", "/x/y", PathUse::kRead, false);
  ExpectAllowed(*(*file)->Get(), "a", "/z/y", PathUse::kRead, true);
  testing::WriteText(path, "namespaces: {a: {read: [z]}}");
  (*file)->Refresh();
  ExpectAllowed(*(*file)->Get(), "a", "/z/y", PathUse::kRead, true);
}

}  // namespace
}  // namespace ravel::coordinator
