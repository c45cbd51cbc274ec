#include "worker/daemon/confinement.h"

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing/process.h"
#include "tests/testing/required.h"

namespace ravel::daemon {
namespace {

constexpr int kNoLandlock = 77;

// The exit code of a process that is confined and then does `work`.
int InConfinedProcess(const Confinement& confinement, const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    const absl::Status confined = Confine(confinement);
    _exit(absl::IsUnimplemented(confined) ? kNoLandlock : confined.ok() ? work() : 78);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Errno of an open, or 0.
int Opening(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
  const int error = fd < 0 ? errno : 0;
  close(fd);
  return error;
}

class ConfinementTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* folder : {"/data", "/stores", "/outside"}) {
      std::filesystem::create_directories(scratch_.path() + folder);
      testing::WriteText(scratch_.path() + folder + "/file", "x");
    }
    if (InConfinedProcess({}, [] { return 0; }) == kNoLandlock) {
      testing::SkipWithout("landlock", "this kernel offers no Landlock");
    }
  }
  std::string At(const std::string& rest) const { return scratch_.path() + rest; }
  // Runs in a confined process; what of `expected` (path, flags, errno) is not so, as a bit.
  struct Case {
    std::string path;
    int flags;
    int error;
  };
  void Expect(const std::vector<Case>& cases) const {
    const Confinement confinement =
        ConfinementOf({.read = {At("/data")}, .write = {At("/stores")}});
    const int wrong = InConfinedProcess(confinement, [&cases] {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (Opening(cases[i].path, cases[i].flags) != cases[i].error) {
          return static_cast<int>(i) + 1;
        }
      }
      return 0;
    });
    EXPECT_EQ(wrong, 0) << "case " << wrong << ": "
                        << (wrong > 0 && wrong <= static_cast<int>(cases.size())
                                ? cases[static_cast<std::size_t>(wrong) - 1].path
                                : "");
  }

  testing::ScratchFolder scratch_;
};

TEST_F(ConfinementTest, RootsAreOpenAsTheyAreGivenAndNothingElseIs) {
  Expect({{At("/data/file"), O_RDONLY, 0},
          {At("/data/file"), O_WRONLY, EACCES},
          {At("/data/new"), O_WRONLY | O_CREAT, EACCES},
          {At("/stores/file"), O_RDONLY, 0},
          {At("/stores/file"), O_WRONLY | O_TRUNC, 0},
          {At("/stores/new"), O_WRONLY | O_CREAT | O_EXCL, 0},
          {At("/stores"), O_TMPFILE | O_RDWR, 0},
          {At("/outside/file"), O_RDONLY, EACCES},
          {At("/outside/file"), O_WRONLY, EACCES},
          {At("/outside"), O_RDONLY | O_DIRECTORY, EACCES}});
}

TEST_F(ConfinementTest, ALinkIsJudgedByWhereItLeadsWhenItIsOpened) {
  std::filesystem::create_symlink(At("/outside/file"), At("/data/link"));
  std::filesystem::create_symlink("../outside", At("/stores/link"));
  Expect(
      {{At("/data/link"), O_RDONLY, EACCES}, {At("/stores/link/new"), O_WRONLY | O_CREAT, EACCES}});
}

TEST(ConfinementPathsTest, AFileInTheRootFolderOpensNoOther) {
  std::vector<std::string> paths;
  AddFolderOf("/etc/ravel/token", paths);
  AddFolderOf("/token", paths);
  AddFolderOf("", paths);
  EXPECT_EQ(paths, std::vector<std::string>({"/etc/ravel", "/token"}));
}

TEST(ConfinementPathsTest, ADaemonWithoutRootsOrWithOffIsNot) {
  EXPECT_FALSE(*ConfineDaemon({.mode = "always", .roots = {}}));
  EXPECT_FALSE(*ConfineDaemon({.mode = "off", .roots = {.read = {"/usr"}}}));
}

TEST_F(ConfinementTest, WhatProgramsNeedIsThere) {
  Expect({{"/etc/passwd", O_RDONLY, 0},
          {"/etc/new", O_WRONLY | O_CREAT, EACCES},
          {"/proc/self/status", O_RDONLY, 0},
          {"/dev/null", O_RDWR, 0},
          {"/dev/urandom", O_RDONLY, 0},
          {"/dev/shm", O_RDONLY | O_DIRECTORY, 0},
          {"/usr", O_RDONLY | O_DIRECTORY, 0}});
}

TEST_F(ConfinementTest, RenamesBetweenFoldersOfARootWork) {
  std::filesystem::create_directories(At("/stores/a"));
  std::filesystem::create_directories(At("/stores/b"));
  testing::WriteText(At("/stores/a/x"), "x");
  EXPECT_EQ(InConfinedProcess(
                ConfinementOf({.write = {At("/stores")}}),
                [&] { return rename(At("/stores/a/x").c_str(), At("/stores/b/x").c_str()); }),
            0);
}

// Ranks of one daemon open the memory of rank 0 through /proc.
TEST_F(ConfinementTest, ProcessesOfOneConfinementShareMemoryThroughProc) {
  const int wrong = InConfinedProcess(ConfinementOf({.read = {At("/data")}}), [] {
    const int memory = memfd_create("shared", MFD_CLOEXEC);
    const std::string path = absl::StrCat("/proc/", getpid(), "/fd/", memory);
    const pid_t peer = fork();
    if (peer == 0) {
      _exit(Opening(path, O_RDWR));
    }
    int status = 0;
    waitpid(peer, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
  });
  EXPECT_EQ(wrong, 0) << "errno";
}

}  // namespace
}  // namespace ravel::daemon
