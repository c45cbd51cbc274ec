// A file system alone can fail in the middle of listing a folder.

#include "common/store/file_store.h"

#include <atomic>
#include <cerrno>
#include <string>

#include <dirent.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "tests/testing/process.h"

namespace {

std::atomic<bool> listings_fail = false;

}  // namespace

// In place of libc's, for this whole program.
dirent* readdir(DIR* stream) {
  static const auto real = reinterpret_cast<dirent* (*)(DIR*)>(dlsym(RTLD_NEXT, "readdir"));
  CHECK(real != nullptr);
  if (listings_fail) {
    errno = EIO;
    return nullptr;
  }
  return real(stream);
}

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

class FailingListings {
 public:
  FailingListings() { listings_fail = true; }
  ~FailingListings() { listings_fail = false; }
  FailingListings(const FailingListings&) = delete;
  FailingListings& operator=(const FailingListings&) = delete;
};

// Not AlreadyExists, "Directory not empty", which a settled save reads as one that lost.
TEST(FileStoreListingTest, AnErrorInTheMiddleIsToldByRemovalsAndPublications) {
  const testing::ScratchFolder scratch;
  FileStore files(scratch.path());
  ASSERT_TRUE(files.MakeDirectory("attempt").ok());
  ASSERT_TRUE(files.MakeDirectory("attempt/seals").ok());
  ASSERT_TRUE(files.Put("attempt/seals/00001", "seal").ok());
  {
    const FailingListings failing;
    for (const absl::Status& status : {files.List("attempt/seals").status(),
                                       files.Withdraw("attempt/seals"),
                                       files.PublishIfAbsent("attempt", "step")}) {
      EXPECT_TRUE(absl::IsInternal(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("Input/output error"));
    }
  }
  EXPECT_TRUE(*Exists(files, "attempt/seals/00001"));
  EXPECT_FALSE(*Exists(files, "step"));
  EXPECT_TRUE(files.Withdraw("attempt/seals").ok());
}

}  // namespace
}  // namespace ravel::store
