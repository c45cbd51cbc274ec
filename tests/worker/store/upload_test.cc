// One file while it is written: two buffers that take turns, and a disk that fails meanwhile.

#include "worker/store/upload.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/crc32c.h"
#include "common/signed_size.h"

namespace ravel::store_server {
namespace {

uint32_t SumOf(const std::string& text) {
  return Crc32c(0, text.data(), text.size());
}

class UploadTest : public ::testing::Test {
 protected:
  UploadTest()
      : root_(std::filesystem::temp_directory_path() /
              ("ravel-upload-" + std::to_string(getpid()))) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~UploadTest() override { std::filesystem::remove_all(root_); }

  std::unique_ptr<Upload> Begin(int64_t offset = 0) {
    absl::StatusOr<std::unique_ptr<Upload>> upload =
        Upload::Open(&book_, part(), path(), offset, 0);
    EXPECT_TRUE(upload.ok()) << upload.status();
    return upload.ok() ? std::move(*upload) : nullptr;
  }
  std::string part() const { return root_ + "/f.part"; }
  std::string path() const { return root_ + "/f"; }
  static std::string Contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string root_;
  UploadBook book_{0};
};

// Block i of a file; no two are alike.
std::string BlockOf(int i) {
  std::string block(Size(kUploadBlockBytes), '\0');
  for (size_t at = 0; at < block.size(); ++at) {
    block[at] = static_cast<char>(at / 4096 + static_cast<size_t>(i) * 37);
  }
  return block;
}

TEST_F(UploadTest, BlocksGoOnWhileEarlierOnesAreWritten) {
  std::string sent;
  {
    const auto upload = Begin();
    for (int i = 0; i < 9; ++i) {
      const std::string block = BlockOf(i);
      ASSERT_EQ(upload->Append(block, SumOf(block)), absl::OkStatus());
      sent += block;
      if (!upload->MayTakeMore()) {
        ASSERT_EQ(upload->Start(), absl::OkStatus());
      }
      EXPECT_EQ(upload->appended(), std::ssize(sent));
      EXPECT_LE(upload->written(), upload->appended());
    }
    EXPECT_EQ(upload->written(), 4 * kUploadBlockBytes) << "the second four are on their way";
    ASSERT_EQ(upload->Settle(), absl::OkStatus());
    EXPECT_EQ(upload->written(), 8 * kUploadBlockBytes);
    EXPECT_EQ(std::filesystem::file_size(part()), Size(8 * kUploadBlockBytes));
    EXPECT_EQ(book_.used_bytes(), 8 * kUploadBlockBytes);
  }
  // The ninth was taken, and not begun.
  sent.resize(Size(8 * kUploadBlockBytes));
  const auto upload = Begin(8 * kUploadBlockBytes);
  ASSERT_EQ(upload->Append("end", SumOf("end")), absl::OkStatus());
  sent += "end";
  ASSERT_EQ(upload->Finish(std::ssize(sent), SumOf(sent)), absl::OkStatus());
  EXPECT_TRUE(Contents(path()) == sent);
  EXPECT_EQ(book_.used_bytes(), std::ssize(sent));
}

TEST_F(UploadTest, WhatWasBegunIsInThePartThatAClosedStreamLeaves) {
  std::string sent;
  {
    const auto upload = Begin();
    for (int i = 0; i < 4; ++i) {
      const std::string block = BlockOf(i);
      ASSERT_TRUE(upload->Append(block, SumOf(block)).ok());
      sent += block;
    }
    ASSERT_TRUE(upload->Start().ok());
  }
  EXPECT_TRUE(Contents(part()) == sent);
  const auto upload = Begin(std::ssize(sent));
  ASSERT_EQ(upload->Finish(std::ssize(sent), SumOf(sent)), absl::OkStatus()) << "with its checksum";
}

TEST_F(UploadTest, ADiskThatFailsMeanwhileIsToldByTheNextCall) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  {
    const auto upload = Begin();
    std::string sent;
    for (int i = 0; i < 4; ++i) {
      const std::string block = BlockOf(i);
      ASSERT_TRUE(upload->Append(block, SumOf(block)).ok());
      sent += block;
    }
    ASSERT_TRUE(upload->Flush().ok());
    rlimit limit = before;
    limit.rlim_cur = Size(5 * kUploadBlockBytes);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (int i = 4; i < 8; ++i) {
      ASSERT_TRUE(upload->Append(BlockOf(i), SumOf(BlockOf(i))).ok());
    }
    ASSERT_TRUE(upload->Start().ok());
    const std::string block = BlockOf(8);
    ASSERT_TRUE(upload->Append(block, SumOf(block)).ok()) << "into the other buffer";
    const absl::Status failed = upload->Start();
    EXPECT_FALSE(failed.ok());
    EXPECT_THAT(std::string(failed.message()), ::testing::HasSubstr("File too large"));
    EXPECT_EQ(upload->written(), 4 * kUploadBlockBytes);
    EXPECT_TRUE(Contents(part()) == sent) << "whole or not at all";
    EXPECT_EQ(book_.used_bytes(), 4 * kUploadBlockBytes);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  }
  EXPECT_EQ(book_.used_bytes(), 4 * kUploadBlockBytes);
  EXPECT_TRUE(book_.Reserve(0).ok());
}

}  // namespace
}  // namespace ravel::store_server
