// Blocks as they arrive, against protobuf's own reading of them.

#include "worker/store/write_message_service.h"

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"
#include "worker/store/upload.h"

namespace ravel::store_server {
namespace {

// The bytes in slices of `piece` bytes.
grpc::ByteBuffer Slices(std::string_view bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    slices.emplace_back(std::string(bytes.substr(at, piece)));
  }
  return {slices.data(), slices.size()};
}

// Gives memory for blocks, and remembers what was asked for.
class Memory {
 public:
  RoomForBlock room() {
    return [this](int64_t bytes) -> absl::StatusOr<std::span<char>> {
      asked_.push_back(bytes);
      bytes_.assign(Size(bytes), '?');
      return std::span<char>(bytes_);
    };
  }
  const std::vector<int64_t>& asked() const { return asked_; }

 private:
  std::string bytes_;
  std::vector<int64_t> asked_;
};

v1::StoreWriteRequest Block(std::string data) {
  v1::StoreWriteRequest block;
  block.set_offset(int64_t{1} << 40);
  block.set_data(std::move(data));
  block.set_crc32c(0xfedcba98);
  return block;
}

std::string Text(const BlockMessage& block) {
  return std::string(block.data.data(), block.data.size());
}

TEST(WriteMessageTest, ABlockComesTogetherHoweverItWasCut) {
  std::string data(100'000, 'd');
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i * 31);
  }
  const std::string bytes = Block(data).SerializeAsString();
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{4096}, bytes.size()}) {
    Memory memory;
    const auto block = ReadBlockMessage(Slices(bytes, piece), memory.room());
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(block->offset, int64_t{1} << 40);
    EXPECT_EQ(block->crc32c, 0xfedcba98);
    EXPECT_FALSE(block->finish);
    EXPECT_TRUE(Text(*block) == data) << piece;
  }
}

TEST(WriteMessageTest, TheLastMessageAsksForNoMemory) {
  v1::StoreWriteRequest last;
  last.set_offset(5);
  last.set_finish(true);
  Memory memory;
  const auto block = ReadBlockMessage(Slices(last.SerializeAsString(), 3), memory.room());
  ASSERT_TRUE(block.ok());
  EXPECT_TRUE(block->finish);
  EXPECT_EQ(block->offset, 5);
  EXPECT_TRUE(block->data.empty());
  EXPECT_TRUE(memory.asked().empty());
}

TEST(WriteMessageTest, WhatIsTooLongOrNoMessageIsRefused) {
  const std::string whole = Block("abcdef").SerializeAsString();
  const std::string refused[] = {
      whole.substr(0, whole.size() - 1),
      whole.substr(0, 9),
      absl::StrCat(whole, whole),  // two blocks
      absl::StrCat(whole, std::string(1, '\0')),
      Block(std::string(Size(kUploadBlockBytes) + 1, 'x')).SerializeAsString(),
      "\x1a\xff\xff\xff\xff\x0f",  // data of 4 GiB
      "\x1a\x05"
      "abc",
  };
  for (const std::string& bytes : refused) {
    Memory memory;
    EXPECT_TRUE(absl::IsInvalidArgument(ReadBlockMessage(Slices(bytes, 4), memory.room()).status()))
        << bytes.size();
    for (const int64_t asked : memory.asked()) {
      EXPECT_LE(asked, kUploadBlockBytes);
    }
    if (bytes != refused[2]) {
      EXPECT_FALSE(ReadFirstMessage(Slices(bytes, 4)).ok() && bytes.size() < 1000) << bytes.size();
    }
  }
  Memory memory;
  const auto full = ReadBlockMessage(Slices(whole, 4),
                                     [](int64_t) { return absl::ResourceExhaustedError("quota"); });
  EXPECT_TRUE(absl::IsResourceExhausted(full.status()));
}

TEST(WriteMessageTest, MutatedMessagesReadAsProtobufReadsThem) {
  testing::SilenceProtobuf();
  v1::StoreWriteRequest last;
  last.set_offset(6);
  last.set_crc32c(1);
  last.set_finish(true);
  const v1::StoreWriteRequest prototype;
  testing::FuzzTarget target = {.name = "write-message"};
  target.seeds = {Block("abcdef").SerializeAsString(), last.SerializeAsString()};
  target.mutate = testing::MessageMutation(prototype, target.seeds, {"team/job"});
  const testing::FuzzCounts counts = testing::Fuzz(target, [](std::string_view input) {
    Memory memory;
    const size_t piece = 1 + input.size() % 13;
    const auto block = ReadBlockMessage(Slices(input, piece), memory.room());
    v1::StoreWriteRequest message;
    const bool is_message = message.ParseFromArray(input.data(), static_cast<int>(input.size()));
    if (!is_message || message.has_open()) {
      return block.ok() ? testing::Accepted() : testing::Refused();
    }
    if (!block.ok()) {  // a block that is too long, or two of them
      return testing::AcceptedIf(!message.data().empty() || memory.asked().size() > 1,
                                 "refused, and protobuf takes it");
    }
    return testing::AcceptedIf(
        block->offset == message.offset() && Text(*block) == message.data() &&
        block->crc32c == message.crc32c() && block->finish == message.finish());
  });
  EXPECT_GT(counts.accepted, counts.runs / 10);
}

}  // namespace
}  // namespace ravel::store_server
