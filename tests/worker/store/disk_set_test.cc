// Files of a store on its disks, without a network.

#include "worker/store/disk_set.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/crc32c.h"

namespace ravel::store_server {
namespace {

constexpr char kUpload[] = "0123456789abcdef";
constexpr char kOther[] = "fedcba9876543210";

uint32_t Crc(const std::string& text) {
  return Crc32c(0, text.data(), text.size());
}

class DiskSetTest : public ::testing::Test {
 protected:
  DiskSetTest()
      : root_(std::filesystem::temp_directory_path() /
              ("ravel-disks-" + std::to_string(getpid()))) {
    std::filesystem::remove_all(root_);
    Open();
  }
  ~DiskSetTest() override {
    disks_.reset();
    std::filesystem::remove_all(root_);
  }
  void Open(int64_t quota = 0, int64_t min_free = 0) {
    DiskOptions options;
    options.quota_bytes = quota;
    options.min_free_bytes = min_free;
    for (const char* name : {"/a", "/b"}) {
      std::filesystem::create_directories(root_ + name);
      options.folders.push_back(root_ + name);
    }
    disks_ = *DiskSet::Open(options);
  }
  absl::Status Write(const std::string& path, const std::string& content) {
    ASSIGN_OR_RETURN(const auto upload, disks_->BeginUpload(path, kUpload, 0, 0));
    if (!content.empty()) {
      RETURN_IF_ERROR(upload->Append(content, Crc(content)));
    }
    return upload->Finish(static_cast<int64_t>(content.size()), Crc(content));
  }
  std::string Read(const std::string& path) const {
    const auto reader = disks_->OpenFile(path);
    if (!reader.ok()) {
      return std::string(reader.status().message());
    }
    std::string content(static_cast<size_t>((*reader)->size()), '\0');
    EXPECT_TRUE((*reader)
                    ->ReadAt(0, std::as_writable_bytes(std::span(content.data(), content.size())))
                    .ok());
    return content;
  }

  const std::string root_;
  std::unique_ptr<DiskSet> disks_;
};

TEST_F(DiskSetTest, AnUploadGoesOnWhereItWasCut) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  {
    const auto upload = disks_->BeginUpload("team/job/f", kUpload, 0, 10);
    ASSERT_TRUE(upload.ok()) << upload.status();
    ASSERT_TRUE((*upload)->Append("abcdef", Crc("abcdef")).ok());
    ASSERT_TRUE((*upload)->Flush().ok());
  }
  EXPECT_EQ(*disks_->WrittenOf("team/job/f", kUpload), 6);
  EXPECT_TRUE(disks_->List("team/job")->empty()) << "nobody sees it";
  Open();  // another server
  const auto upload = disks_->BeginUpload("team/job/f", kUpload, 4, 10);
  ASSERT_TRUE(upload.ok()) << upload.status();
  ASSERT_TRUE((*upload)->Append("XYZ", Crc("XYZ")).ok());
  ASSERT_TRUE((*upload)->Finish(7, Crc("abcdXYZ")).ok());
  EXPECT_EQ(Read("team/job/f"), "abcdXYZ");
  EXPECT_EQ(*disks_->ChecksumOf("team/job/f"), Crc("abcdXYZ"));
  EXPECT_TRUE(absl::IsOutOfRange(disks_->BeginUpload("team/job/g", kUpload, 4, 10).status()));
}

TEST_F(DiskSetTest, BlocksOfAnySizeMakeTheFileThatWasSent) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  std::string content(9'500'000, '\0');
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<char>(i * 2654435761u >> 13);
  }
  // Whole pages past the cache, odd ends by it, and after them all by it; begun again at odd
  // places.
  const std::vector<std::vector<size_t>> sizes = {{4096, 8192, 4'000'000, 1, 4095, 100'000},
                                                  {2 << 20, 2 << 20, 3 << 20, 1'000'000},
                                                  {8'000'000},
                                                  {5, 4091, 4096, 2 << 20}};
  for (size_t row = 0; row < sizes.size(); ++row) {
    const std::string path = absl::StrCat("team/job/f", row);
    size_t at = 0;
    for (const size_t size : sizes[row]) {
      const auto upload = disks_->BeginUpload(
          path, kUpload, static_cast<int64_t>(at), static_cast<int64_t>(content.size()));
      ASSERT_TRUE(upload.ok()) << upload.status();
      const std::string block = content.substr(at, size);
      ASSERT_TRUE((*upload)->Append(block, Crc(block)).ok());
      ASSERT_TRUE((*upload)->Flush().ok());
      at += block.size();
      ASSERT_EQ(*disks_->WrittenOf(path, kUpload), static_cast<int64_t>(at));
    }
    const auto upload = disks_->BeginUpload(path, kUpload, static_cast<int64_t>(at), 0);
    ASSERT_TRUE(upload.ok()) << upload.status();
    const std::string sent = content.substr(0, at);
    ASSERT_EQ((*upload)->Finish(static_cast<int64_t>(at), Crc(sent)), absl::OkStatus());
    EXPECT_TRUE(Read(path) == sent) << row;
  }
}

TEST_F(DiskSetTest, BlocksThatAreWrittenTogetherAreThereOnceTheyAreFlushed) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  const std::string block(2 << 20, 'b');
  std::string sent;
  const auto upload = disks_->BeginUpload("team/job/f", kUpload, 0, 0);
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE((*upload)->Append(block, Crc(block)).ok());
    sent += block;
    EXPECT_EQ((*upload)->appended(), std::ssize(sent));
    EXPECT_LE(*disks_->WrittenOf("team/job/f", kUpload), std::ssize(sent));
  }
  ASSERT_TRUE((*upload)->Flush().ok());
  EXPECT_FALSE((*upload)->MayTakeMore()) << "nothing waits";
  EXPECT_EQ(*disks_->WrittenOf("team/job/f", kUpload), std::ssize(sent));
  EXPECT_EQ(disks_->used_bytes(), std::ssize(sent));
  ASSERT_TRUE((*upload)->Append("end", Crc("end")).ok());
  sent += "end";
  ASSERT_EQ((*upload)->Finish(std::ssize(sent), Crc(sent)), absl::OkStatus());
  EXPECT_TRUE(Read("team/job/f") == sent);
}

TEST_F(DiskSetTest, BlocksThatWereLostAreFoundBeforeTheFileGetsItsName) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  {
    const auto upload = disks_->BeginUpload("team/job/f", kUpload, 0, 0);
    ASSERT_TRUE((*upload)->Append("abcdef", Crc("abcdef")).ok());
    ASSERT_TRUE((*upload)->Flush().ok());
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root_)) {
    if (entry.path().extension() == ".part") {  // as after a loss of power
      std::ofstream(entry.path(), std::ios::in | std::ios::out).write("\0\0\0", 3);
    }
  }
  Open();
  const auto upload = disks_->BeginUpload("team/job/f", kUpload, 6, 0);
  ASSERT_TRUE(upload.ok());
  EXPECT_TRUE(absl::IsDataLoss((*upload)->Finish(6, Crc("abcdef"))));
  EXPECT_TRUE(absl::IsNotFound(disks_->Stat("team/job/f").status()));
  EXPECT_EQ(*disks_->WrittenOf("team/job/f", kUpload), 0) << "it begins again";
}

TEST_F(DiskSetTest, OneOfTwoUploadsOfANameWins) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  const auto first = disks_->BeginUpload("team/job/f", kUpload, 0, 0);
  const auto second = disks_->BeginUpload("team/job/f", kOther, 0, 0);
  ASSERT_TRUE((*first)->Append("1", Crc("1")).ok());
  ASSERT_TRUE((*second)->Append("2", Crc("2")).ok());
  EXPECT_TRUE((*second)->Finish(1, Crc("2")).ok());
  EXPECT_TRUE(absl::IsAlreadyExists((*first)->Finish(1, Crc("1"))));
  EXPECT_EQ(Read("team/job/f"), "2");
  EXPECT_TRUE(absl::IsAlreadyExists(disks_->BeginUpload("team/job/f", kOther, 0, 0).status()));
}

TEST_F(DiskSetTest, FoldersOfJobsStayOnOneDiskAndAreSeenOnAll) {
  std::filesystem::create_directories(root_ + "/a/team/one");
  std::filesystem::create_directories(root_ + "/b/team/two");
  ASSERT_TRUE(disks_->MakeFolder("team/two/attempt", false).ok());
  ASSERT_TRUE(disks_->MakeFolder("team/two/attempt/model", false).ok());
  ASSERT_TRUE(Write("team/two/attempt/model/f", "x").ok());
  EXPECT_TRUE(std::filesystem::exists(root_ + "/b/team/two/attempt/model/f"));
  ASSERT_TRUE(disks_->Publish("team/two/attempt", "team/two/step").ok());
  EXPECT_EQ(Read("team/two/step/model/f"), "x");
  const auto listed = disks_->List("team");
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ((*listed)[0].name, "one");
  // A name that another disk has is taken.
  EXPECT_TRUE(absl::IsAlreadyExists(disks_->Publish("team/two", "team/one")));
  EXPECT_TRUE(absl::IsNotFound(disks_->Publish("team/none", "team/new")));
  ASSERT_TRUE(disks_->Withdraw("team").ok());
  EXPECT_TRUE(absl::IsNotFound(disks_->Withdraw("team")));
  EXPECT_TRUE(disks_->List("")->empty());
}

TEST_F(DiskSetTest, TheQuotaCountsWhatIsThereAndWhatIsPromised) {
  Open(10);
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  ASSERT_TRUE(Write("team/job/f", "123456").ok());
  EXPECT_EQ(disks_->used_bytes(), 6);
  EXPECT_EQ(disks_->FreeBytes(), 4);
  EXPECT_TRUE(absl::IsResourceExhausted(disks_->BeginUpload("team/job/g", kUpload, 0, 5).status()));
  {
    const auto upload = disks_->BeginUpload("team/job/g", kUpload, 0, 4);
    ASSERT_TRUE(upload.ok());
    EXPECT_EQ(disks_->FreeBytes(), 0);
    ASSERT_TRUE((*upload)->Append("1234", Crc("1234")).ok());
    EXPECT_TRUE(absl::IsResourceExhausted((*upload)->Append("5", Crc("5"))));
    ASSERT_TRUE((*upload)->Flush().ok());
  }
  Open(10);
  EXPECT_EQ(disks_->used_bytes(), 10) << "parts count";
  EXPECT_EQ(disks_->RemoveOldParts(std::numeric_limits<int64_t>::max(), 0), 4);
  ASSERT_TRUE(disks_->Withdraw("team/job/f").ok());
  EXPECT_EQ(disks_->used_bytes(), 0);
}

// The part of a save that failed: whoever removes it counts it off.
TEST_F(DiskSetTest, PartsThatAPublicationRemovesAreCountedOff) {
  ASSERT_TRUE(disks_->MakeFolder("team/job/attempt", true).ok());
  ASSERT_TRUE(Write("team/job/attempt/f", "123456").ok());
  {
    const auto upload = disks_->BeginUpload("team/job/attempt/g", kUpload, 0, 0);
    ASSERT_TRUE((*upload)->Append("1234", Crc("1234")).ok());
    ASSERT_TRUE((*upload)->Flush().ok());
  }
  EXPECT_EQ(disks_->used_bytes(), 10);
  ASSERT_TRUE(disks_->Publish("team/job/attempt", "team/job/removed").ok());
  EXPECT_EQ(disks_->used_bytes(), 6);
  ASSERT_TRUE(disks_->Withdraw("team/job/removed").ok());
  EXPECT_EQ(disks_->used_bytes(), 0);
}

// Its stream goes on for a while: all that it writes is counted off, and once.
TEST_F(DiskSetTest, APartThatGoesWhileItIsWrittenIsCountedOffAtTheEnd) {
  for (const bool published : {true, false}) {
    SCOPED_TRACE(published);
    ASSERT_TRUE(disks_->MakeFolder("team/job/attempt", true).ok());
    auto upload = *disks_->BeginUpload("team/job/attempt/g", kUpload, 0, 0);
    ASSERT_TRUE(upload->Append("1234", Crc("1234")).ok());
    ASSERT_TRUE(upload->Flush().ok());
    ASSERT_TRUE((published ? disks_->Publish("team/job/attempt", "team/job/removed")
                           : disks_->Withdraw("team/job/attempt"))
                    .ok());
    ASSERT_TRUE(upload->Append("56", Crc("56")).ok());
    EXPECT_TRUE(absl::IsNotFound(upload->Finish(6, Crc("123456"))));
    upload.reset();
    EXPECT_EQ(disks_->used_bytes(), 0);
  }
}

TEST_F(DiskSetTest, TwoRemovalsOfAFolderCountEachFileOffOnce) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(disks_->MakeFolder("team/job/step", true).ok());
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(Write(absl::StrCat("team/job/step/f", i), "123456").ok());
    }
    std::thread other([&] { disks_->Withdraw("team/job/step").IgnoreError(); });
    disks_->Withdraw("team/job/step").IgnoreError();
    other.join();
    ASSERT_EQ(disks_->used_bytes(), 0) << round;
  }
}

TEST_F(DiskSetTest, AFullStoreTakesTheMarkOfARemoval) {
  ASSERT_TRUE(disks_->MakeFolder("team/job/step", true).ok());
  ASSERT_TRUE(Write("team/job/step/f", "123456").ok());
  Open(5);  // lowered below what is there
  EXPECT_TRUE(absl::IsResourceExhausted(Write("team/job/step/g", "1")));
  EXPECT_EQ(Write("team/job/step/DELETED", ""), absl::OkStatus());
  Open(0, int64_t{1} << 60);
  EXPECT_TRUE(
      absl::IsResourceExhausted(disks_->BeginUpload("team/job/step/g", kUpload, 0, 1).status()));
  EXPECT_EQ(Write("team/job/step/withdrawn", ""), absl::OkStatus());
}

TEST_F(DiskSetTest, SmallFilesMayTakeHalfOfWhatStaysFree) {
  ASSERT_TRUE(disks_->MakeFolder("team/job", true).ok());
  Open(0, disks_->FreeBytes() / 2 * 3);
  EXPECT_TRUE(absl::IsResourceExhausted(
      disks_->BeginUpload("team/job/shard", kUpload, 0, (16 << 20) + 1).status()));
  EXPECT_EQ(disks_->BeginUpload("team/job/manifest.pb", kUpload, 0, 16 << 20).status(),
            absl::OkStatus());
}

TEST_F(DiskSetTest, PathsStayInTheStore) {
  EXPECT_TRUE(CheckPath("path", "").ok());
  EXPECT_TRUE(CheckPath("path", "team/job/step-0000000020/COMMIT").ok());
  for (const std::string& path : {std::string("/etc/passwd"),
                                  std::string("a/../b"),
                                  std::string("a//b"),
                                  std::string("a/"),
                                  std::string("."),
                                  std::string("a/\x1b[2J"),
                                  std::string("a\0b", 3),
                                  std::string(300, 'x'),
                                  std::string("a/f.part"),
                                  std::string("a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a")}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckPath("path", path))) << path;
  }
}

}  // namespace
}  // namespace ravel::store_server
