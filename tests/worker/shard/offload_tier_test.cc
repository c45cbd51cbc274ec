// A tier's room, its memory as it comes and goes, and its errors.

#include "worker/shard/offload_tier.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ravel::shard {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class OffloadTierTest : public ::testing::Test {
 protected:
  OffloadTierTest() { std::filesystem::create_directories(folder_); }
  ~OffloadTierTest() override { std::filesystem::remove_all(folder_); }

  static std::span<const std::byte> Part(const OffloadTier& tier, int64_t at, int64_t bytes) {
    return tier.all().subspan(static_cast<size_t>(at), static_cast<size_t>(bytes));
  }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_tier_", ::getpid());
};

// Mapped pages of files in this process.
int64_t ResidentFileBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0, shared = 0;
  statm >> size >> resident >> shared;
  return shared * ::sysconf(_SC_PAGESIZE);
}

TEST_F(OffloadTierTest, IsZeroHasNoNameAndTakesItsRoomAtOnce) {
  const auto tier = OffloadTier::Create(folder_, 5 * kMiB + 100);
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  EXPECT_EQ((*tier)->all().size(), static_cast<size_t>(5 * kMiB + 100));
  ASSERT_TRUE((*tier)->Fetch((*tier)->all(), OffloadTier::For::kReading).ok());
  for (const std::byte byte : (*tier)->all()) {
    ASSERT_EQ(byte, std::byte{0});
  }
  EXPECT_TRUE((*tier)->Holds((*tier)->all().data()));
  EXPECT_FALSE((*tier)->Holds((*tier)->all().data() + (*tier)->all().size()));
  EXPECT_FALSE((*tier)->Holds(nullptr));
}

TEST_F(OffloadTierTest, WhatIsReleasedLeavesMemoryAndComesBack) {
  const auto made = OffloadTier::Create(folder_, 32 * kMiB);
  ASSERT_TRUE(made.ok()) << made.status();
  OffloadTier& tier = **made;
  const int64_t before = ResidentFileBytes();
  ASSERT_TRUE(tier.Fetch(tier.all(), OffloadTier::For::kWriting).ok());
  EXPECT_GE(ResidentFileBytes() - before, 31 * kMiB);
  std::memset(tier.all().data(), 7, tier.all().size());
  ASSERT_TRUE(tier.Release(tier.all()).ok());
  EXPECT_LT(ResidentFileBytes() - before, kMiB);
  // Ranges need not be whole pages.
  ASSERT_TRUE(tier.Fetch(Part(tier, 5000, 1), OffloadTier::For::kReading).ok());
  for (const std::byte byte : tier.all()) {
    ASSERT_EQ(byte, std::byte{7});
  }
}

TEST_F(OffloadTierTest, AccessGoesThroughItAndLeavesNothingInMemory) {
  const auto made = OffloadTier::Create(folder_, 16 * kMiB);
  ASSERT_TRUE(made.ok()) << made.status();
  OffloadTier& tier = **made;
  TieredAccess access(&tier);
  std::vector<std::byte> values(static_cast<size_t>(9 * kMiB + 3));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::byte>(i * 31 % 251);
  }
  const int64_t before = ResidentFileBytes();
  ASSERT_TRUE(access.Write(values, tier.all().data() + 77).ok());
  std::vector<std::byte> back(values.size());
  ASSERT_TRUE(access.Read(tier.all().data() + 77, back).ok());
  EXPECT_EQ(back, values);
  EXPECT_LT(ResidentFileBytes() - before, kMiB);
  // Other memory is memory.
  std::vector<std::byte> plain(10);
  ASSERT_TRUE(access.Write(std::span(values).first(10), plain.data()).ok());
  EXPECT_TRUE(std::equal(plain.begin(), plain.end(), values.begin()));
  EXPECT_TRUE(access.Settle(plain).ok());
}

TEST_F(OffloadTierTest, ErrorsNameTheField) {
  const auto expect = [&](const std::string& path, int64_t bytes, const std::string& text) {
    const absl::Status status = OffloadTier::Create(path, bytes).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("training.optimizer.offload.path: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect(folder_ + "/missing", kMiB, "No such file");
  std::ofstream(folder_ + "/file") << "x";
  expect(folder_ + "/file", kMiB, "Not a directory");
  expect(folder_, int64_t{1} << 50, "no room for ");
  EXPECT_TRUE(absl::IsResourceExhausted(OffloadTier::Create(folder_, int64_t{1} << 50).status()));
  if (::geteuid() != 0) {  // root may write everywhere
    ::chmod(folder_.c_str(), 0500);
    expect(folder_, kMiB, "Permission denied");
    ::chmod(folder_.c_str(), 0700);
  }
}

}  // namespace
}  // namespace ravel::shard
