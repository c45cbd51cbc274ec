#include "common/token_check.h"

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/file_writer.h"
#include "common/token_sample.h"

namespace ravel {
namespace {

class TokenCheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "token_check_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    prefix_ = folder_ + "/data";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Documents of `length` ids each, the last one of all being `last`.
  void WritePair(int64_t vocabulary, int documents, int length, int32_t last) {
    const auto writer = MegatronWriter::Create(prefix_, vocabulary);
    ASSERT_TRUE(writer.ok()) << writer.status();
    std::vector<int32_t> ids(static_cast<std::size_t>(length), 1);
    for (int i = 0; i < documents; ++i) {
      ids.back() = i + 1 == documents ? last : 1;
      ASSERT_TRUE((*writer)->AddDocument(ids).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }

  std::string folder_;
  std::string prefix_;
};

TEST_F(TokenCheckTest, TokensAndLargestIdAreThoseOfTheMappedFile) {
  for (const int64_t vocabulary : {60'000, 1'000'000}) {
    // More sequences and more ids than one block holds.
    WritePair(vocabulary, 70'000, 2, static_cast<int32_t>(vocabulary - 1));
    const auto mapped = TokenFile::Open(prefix_, TokenFormat::kAuto);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    const auto all =
        CheckTokenFile(prefix_, TokenFormat::kAuto, {.scanned_tokens = 1 << 24, .sample = true});
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ(all->tokens, (*mapped)->tokens());
    EXPECT_EQ(all->largest_id, vocabulary - 1);
    const auto some = CheckTokenFile(prefix_, TokenFormat::kAuto, {.scanned_tokens = 139'999});
    ASSERT_TRUE(some.ok()) << some.status();
    EXPECT_EQ(some->tokens, 140'000);
    EXPECT_EQ(some->largest_id, 1) << "the last id is not scanned";
    const absl::StatusOr<std::string> sampled =
        TokenSampleDigest((*mapped)->tokens(), [&](int64_t begin, std::span<int32_t> ids) {
          (*mapped)->Read(begin, ids);
          return absl::OkStatus();
        });
    ASSERT_TRUE(sampled.ok());
    EXPECT_EQ(all->sample_digest, *sampled);
    EXPECT_EQ(some->sample_digest, "") << "it was not asked for";
  }
}

TEST_F(TokenCheckTest, ANegativeIdCountsAsAHugeOne) {
  ASSERT_TRUE(WriteFileAtomically(prefix_, std::string("\xff\xff\xff\xff", 4)).ok());
  const auto facts = CheckTokenFile(prefix_, TokenFormat::kFlatU32, {.scanned_tokens = 9});
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->largest_id, 0xFFFFFFFFLL);
  ASSERT_TRUE(WriteFileAtomically(prefix_, "").ok());
  EXPECT_EQ(CheckTokenFile(prefix_, TokenFormat::kFlatU32, {.scanned_tokens = 9})->tokens, 0);
}

// Mapped, it would end the process by SIGBUS.
TEST_F(TokenCheckTest, AFileThatShrinksWhileItIsReadIsAnErrorThatNamesIt) {
  for (const std::string shrinks : {".idx", ".bin"}) {
    WritePair(60'000, 200'000, 2, 7);
    int blocks = 0;
    const auto facts = CheckTokenFile(
        prefix_, TokenFormat::kAuto, {.scanned_tokens = 1 << 24, .abandoned = [&] {
                                        // Between two blocks: of the index first, then of the ids.
                                        if (++blocks == (shrinks == ".idx" ? 2 : 10)) {
                                          std::filesystem::resize_file(prefix_ + shrinks, 100);
                                        }
                                        return false;
                                      }});
    ASSERT_FALSE(facts.ok()) << shrinks;
    EXPECT_EQ(facts.status().message().find(prefix_ + shrinks + ": expected "), 0u)
        << facts.status();
    EXPECT_NE(facts.status().message().find("truncated while it was read"), std::string::npos)
        << facts.status();
  }
}

TEST_F(TokenCheckTest, WhatNobodyWaitsForEndsSoon) {
  WritePair(60'000, 10, 2, 7);
  const auto facts =
      CheckTokenFile(prefix_, TokenFormat::kAuto, {.abandoned = [] { return true; }});
  EXPECT_TRUE(absl::IsCancelled(facts.status())) << facts.status();
}

TEST_F(TokenCheckTest, HostileIndexesAreRefusedAsTheyAreWhenMapped) {
  WritePair(100, 6, 3, 7);
  const std::string index = *ReadWholeFile(prefix_ + ".idx", 1 << 20);
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::string damaged = index;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    ASSERT_TRUE(WriteFileAtomically(prefix_ + ".idx", damaged).ok());
    const auto mapped = TokenFile::Open(prefix_, TokenFormat::kAuto);
    const auto checked = CheckTokenFile(prefix_, TokenFormat::kAuto, {});
    EXPECT_EQ(mapped.status(), checked.status()) << round;
  }
}

}  // namespace
}  // namespace ravel
