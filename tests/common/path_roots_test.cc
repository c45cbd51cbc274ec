#include "common/path_roots.h"

#include <filesystem>
#include <string>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/process.h"

namespace ravel {
namespace {

using ::testing::HasSubstr;

class PathRootsTest : public ::testing::TestWithParam<PathRoots::Method> {
 protected:
  void SetUp() override {
    for (const char* folder : {"/data/team", "/stores", "/outside", "/database"}) {
      std::filesystem::create_directories(scratch_.path() + folder);
    }
    testing::WriteText(At("/data/team/tokens.bin"), "x");
    testing::WriteText(At("/outside/secret"), "x");
    testing::WriteText(At("/database/secret"), "x");
  }
  std::string At(const std::string& rest) const { return scratch_.path() + rest; }
  void Link(const std::string& target, const std::string& at) const {
    std::filesystem::create_symlink(target, At(at));
  }
  absl::Status Check(const std::string& path, PathUse use = PathUse::kRead) const {
    return Roots().Check(path, use);
  }
  absl::Status CheckOne(const RootedPath& path) const {
    return Roots().CheckAll(std::span(&path, 1));
  }
  PathRoots Roots() const {
    return *PathRoots::Create({.read = {At("/data")}, .write = {At("/stores")}}, GetParam());
  }
  // Refused, and with the same words whether something is there or not.
  void ExpectTellsNothing(const std::string& there, const std::string& absent) const {
    const absl::Status one = Check(there);
    const absl::Status other = Check(absent);
    EXPECT_TRUE(absl::IsPermissionDenied(one)) << one;
    EXPECT_TRUE(absl::IsPermissionDenied(other)) << other;
    EXPECT_EQ(absl::StrReplaceAll(std::string(one.message()), {{there, "PATH"}}),
              absl::StrReplaceAll(std::string(other.message()), {{absent, "PATH"}}));
  }

  testing::ScratchFolder scratch_;
};

TEST_P(PathRootsTest, WhatLiesBeneathARootPassesAlsoBeforeItIsMade) {
  EXPECT_TRUE(Check(At("/data/team/tokens.bin")).ok());
  EXPECT_TRUE(Check(At("/data")).ok());
  EXPECT_TRUE(Check("file://" + At("/data//./team/")).ok());
  EXPECT_TRUE(Check(At("/data/not/there/yet")).ok());
  EXPECT_TRUE(Check(At("/stores/job/step-1"), PathUse::kWrite).ok());
  EXPECT_TRUE(Check(At("/stores/job/step-1"), PathUse::kRead).ok()) << "stores are resumed from";
}

TEST_P(PathRootsTest, NoPathOutsideIsTouched) {
  ExpectTellsNothing(At("/outside/secret"), At("/outside/absent"));
  ExpectTellsNothing(At("/database/secret"), At("/database/absent"));  // not beneath /data
  ExpectTellsNothing("/etc/passwd", "/etc/no-such-file");
  ExpectTellsNothing(At("/data/../outside/secret"), At("/data/../outside/absent"));
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/team"), PathUse::kWrite)));
  EXPECT_TRUE(absl::IsPermissionDenied(Check("data/team")));
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/team") + std::string("\0x", 2))));
}

TEST_P(PathRootsTest, ALinkThatLeadsOutIsRefusedWhereverItStands) {
  Link("../outside", "/data/folder");
  Link(At("/outside"), "/data/absolute");
  Link("../../outside/secret", "/data/team/file");
  Link("../../../../../../../../../etc", "/data/far");
  ExpectTellsNothing(At("/data/folder/secret"), At("/data/folder/absent"));
  ExpectTellsNothing(At("/data/absolute/secret"), At("/data/absolute/absent"));
  ExpectTellsNothing(At("/data/far/passwd"), At("/data/far/no-such-file"));
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/team/file"))));
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/folder"))));
}

TEST_P(PathRootsTest, ALinkIsNotReadAsIfTheRootWereTheWholeFileSystem) {
  Link("../outside/secret", "/data/relative");
  Link(At("/outside/secret"), "/data/absolute");
  for (const std::string& decoy : {At("/data/outside"), At("/data") + At("/outside")}) {
    std::filesystem::create_directories(decoy);
    testing::WriteText(decoy + "/secret", "x");
  }
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/relative"))));
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/absolute"))));
}

TEST_P(PathRootsTest, ALinkThatStaysInsidePasses) {
  Link("team", "/data/current");
  Link("../data/team", "/data/over");
  Link("current/tokens.bin", "/data/chain.bin");
  EXPECT_TRUE(Check(At("/data/current/tokens.bin")).ok());
  EXPECT_TRUE(Check(At("/data/chain.bin")).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(Check(At("/data/over")))) << "it leaves on its way";
}

TEST_P(PathRootsTest, ALinkToNothingIsRefusedForItCouldBecomeOneThatLeadsOut) {
  Link("later", "/stores/dangling");
  EXPECT_THAT(std::string(Check(At("/stores/dangling"), PathUse::kWrite).message()),
              HasSubstr("symbolic link"));
  EXPECT_FALSE(Check(At("/stores/dangling/job/step"), PathUse::kWrite).ok());
}

TEST_P(PathRootsTest, LinksInARingEnd) {
  Link("b", "/data/a");
  Link("a", "/data/b");
  EXPECT_FALSE(Check(At("/data/a")).ok());
}

TEST_P(PathRootsTest, EveryFileThatIsOpenedForAFieldIsChecked) {
  Link("../../outside/secret", "/data/team/pair.bin");
  const absl::Status pair = CheckOne(
      {"spec.data.train[0].path", At("/data/team/pair"), PathUse::kRead, PathShape::kTokens});
  EXPECT_THAT(std::string(pair.message()), HasSubstr("spec.data.train[0].path: "));
  EXPECT_THAT(std::string(pair.message()), HasSubstr("pair.bin"));
  const RootedPath model = {
      "spec.model.from", At("/data/team"), PathUse::kRead, PathShape::kFolderOfFiles};
  EXPECT_THAT(std::string(CheckOne(model).message()), HasSubstr("spec.model.from: "));
  std::filesystem::remove(At("/data/team/pair.bin"));
  Link("../../data/team/tokens.bin", "/data/team/pair.bin");
  EXPECT_FALSE(CheckOne(model).ok()) << "above its root";
  std::filesystem::remove(At("/data/team/pair.bin"));
  Link("tokens.bin", "/data/team/pair.bin");
  EXPECT_TRUE(CheckOne(model).ok());
  EXPECT_TRUE(CheckOne({"spec.data.train[0].path", "ravel://host:1/data/tokens"}).ok());
  EXPECT_FALSE(CheckOne({"spec.data.train[0].path", "http://host/../etc"}).ok());
  EXPECT_TRUE(CheckOne({"spec.data.tokenizer", ""}).ok());
}

TEST_P(PathRootsTest, WithoutFoldersEverythingPasses) {
  EXPECT_TRUE(PathRoots().Check("/etc/passwd", PathUse::kWrite).ok());
  const PathRoots all = *PathRoots::Create({.write = {"/"}}, GetParam());
  EXPECT_TRUE(all.Check("/etc/passwd", PathUse::kWrite).ok());
  EXPECT_TRUE(all.Check("/", PathUse::kRead).ok());
}

INSTANTIATE_TEST_SUITE_P(Methods,
                         PathRootsTest,
                         ::testing::Values(PathRoots::Method::kBest, PathRoots::Method::kWalk));

TEST(PathRootsPlainTest, FoldersThatAreNoPlainPathsAreRefusedByTheirFlag) {
  EXPECT_THAT(std::string(PathRoots::Create({.read = {"data"}}).status().message()),
              HasSubstr("--read-root: "));
  EXPECT_THAT(std::string(PathRoots::Create({.write = {"/a/../b"}}).status().message()),
              HasSubstr("--write-root: "));
  EXPECT_EQ(PathRoots::Create({.read = {"/a//b/."}})->folders().read[0], "/a/b");
}

TEST(PathRootsPlainTest, AFolderIsNoPrefixOfAName) {
  EXPECT_TRUE(IsBeneath("/a", "/a"));
  EXPECT_TRUE(IsBeneath("/a", "/a/b"));
  EXPECT_TRUE(IsBeneath("/", "/a"));
  EXPECT_FALSE(IsBeneath("/a", "/ab"));
  EXPECT_FALSE(IsBeneath("/a/b", "/a"));
  EXPECT_TRUE(IsBeneath("s3://bucket/team", "s3://bucket/team/x"));
  EXPECT_FALSE(IsBeneath("s3://bucket/team", "s3://bucket/team-b"));
}

}  // namespace
}  // namespace ravel
