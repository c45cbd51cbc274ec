// Messages of blocks against protobuf's own reading and writing of them.

#include "common/store/block_message_client.h"

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "common/crc32c.h"
#include "common/signed_size.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"

namespace ravel::store {
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

TEST(BlockMessageTest, ABlockComesTogetherHoweverItWasCut) {
  std::string data(300'000, 'd');
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i * 31);
  }
  const std::string bytes = Block(data).SerializeAsString();
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{4096}, bytes.size()}) {
    Memory memory;
    const auto block = ReadBlockMessage(Slices(bytes, piece), kWrittenBlock, memory.room());
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(block->offset, int64_t{1} << 40);
    EXPECT_EQ(block->crc32c, 0xfedcba98);
    EXPECT_FALSE(block->finish);
    EXPECT_TRUE(Text(*block) == data) << piece;
    EXPECT_EQ(block->sum, Crc32c(0, data.data(), data.size())) << piece;
  }
}

TEST(BlockMessageTest, WhatAStoreSendsIsReadByItsOwnNumbers) {
  v1::StoreReadReply reply;
  reply.set_offset(int64_t{1} << 40);
  reply.set_data("abcdef");
  reply.set_crc32c(0xfedcba98);
  Memory memory;
  const auto block =
      ReadBlockMessage(Slices(reply.SerializeAsString(), 3), kReadBlock, memory.room());
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(block->offset, int64_t{1} << 40);
  EXPECT_EQ(Text(*block), "abcdef");
  EXPECT_EQ(block->crc32c, 0xfedcba98);
  EXPECT_FALSE(block->finish);
}

std::string BytesOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

TEST(OutgoingBlockTest, IsWhatProtobufReads) {
  BlockMemory memory;
  for (const int64_t size : {int64_t{1},
                             int64_t{127},
                             int64_t{128},
                             int64_t{64} << 10,
                             (int64_t{64} << 10) + 1,
                             (int64_t{128} << 10) - 1,
                             (int64_t{384} << 10) + 5,
                             kStoreBlockBytes}) {
    std::string data(Size(size), 'd');
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<char>((i * 2654435761u) >> 13);
    }
    const OutgoingBlock block =
        memory.BlockOf(std::as_bytes(std::span(data)), (int64_t{1} << 40) + size);
    v1::StoreWriteRequest read;
    ASSERT_TRUE(read.ParseFromString(BytesOf(block.message))) << size;
    EXPECT_FALSE(read.has_open() || read.finish());
    EXPECT_EQ(read.offset(), (int64_t{1} << 40) + size);
    EXPECT_EQ(read.crc32c(), Crc32c(0, data.data(), data.size())) << size;
    EXPECT_TRUE(read.data() == data) << size;
    EXPECT_EQ(block.bytes, size);
    EXPECT_EQ(block.crc32c, read.crc32c());
  }
  v1::StoreWriteRequest last;
  ASSERT_TRUE(last.ParseFromString(BytesOf(LastBlock(7, 9).message)));
  EXPECT_TRUE(last.finish() && last.offset() == 7 && last.crc32c() == 9 && last.data().empty());
}

TEST(OutgoingBlockTest, MemoryIsUsedAgainOnceNobodyHoldsItAndOutlivesItsPool) {
  const std::string data(Size(kStoreBlockBytes), 'd');
  const auto bytes = std::as_bytes(std::span(data));
  auto memory = std::make_unique<BlockMemory>();
  OutgoingBlock first = memory->BlockOf(bytes, 0);
  EXPECT_EQ(memory->spare(), 0u);
  const grpc::ByteBuffer sent = first.message;  // as gRPC holds it
  first = {};
  EXPECT_EQ(memory->spare(), 0u) << "it is on its way";
  OutgoingBlock second = memory->BlockOf(bytes, kStoreBlockBytes);
  second = {};
  EXPECT_EQ(memory->spare(), 1u);
  const OutgoingBlock third = memory->BlockOf(bytes.first(bytes.size() - 1), 0);
  EXPECT_EQ(memory->spare(), 0u) << "the second's";
  memory.reset();
  v1::StoreWriteRequest read;
  ASSERT_TRUE(read.ParseFromString(BytesOf(sent)));
  EXPECT_TRUE(read.data() == data);
}

TEST(BlockMessageTest, TheLastMessageAsksForNoMemory) {
  v1::StoreWriteRequest last;
  last.set_offset(5);
  last.set_finish(true);
  Memory memory;
  const auto block =
      ReadBlockMessage(Slices(last.SerializeAsString(), 3), kWrittenBlock, memory.room());
  ASSERT_TRUE(block.ok());
  EXPECT_TRUE(block->finish);
  EXPECT_EQ(block->offset, 5);
  EXPECT_TRUE(block->data.empty());
  EXPECT_TRUE(memory.asked().empty());
}

TEST(BlockMessageTest, WhatIsTooLongOrNoMessageIsRefused) {
  const std::string whole = Block("abcdef").SerializeAsString();
  const std::string refused[] = {
      whole.substr(0, whole.size() - 1),
      whole.substr(0, 9),
      absl::StrCat(whole, whole),  // two blocks
      absl::StrCat(whole, std::string(1, '\0')),
      Block(std::string(Size(kStoreBlockBytes) + 1, 'x')).SerializeAsString(),
      "\x1a\xff\xff\xff\xff\x0f",  // data of 4 GiB
      "\x1a\x05"
      "abc",
  };
  for (const std::string& bytes : refused) {
    Memory memory;
    EXPECT_TRUE(absl::IsInvalidArgument(
        ReadBlockMessage(Slices(bytes, 4), kWrittenBlock, memory.room()).status()))
        << bytes.size();
    for (const int64_t asked : memory.asked()) {
      EXPECT_LE(asked, kStoreBlockBytes);
    }
    if (bytes != refused[2]) {
      EXPECT_FALSE(ReadFirstMessage(Slices(bytes, 4)).ok() && bytes.size() < 1000) << bytes.size();
    }
  }
  Memory memory;
  const auto full = ReadBlockMessage(Slices(whole, 4), kWrittenBlock, [](int64_t) {
    return absl::ResourceExhaustedError("quota");
  });
  EXPECT_TRUE(absl::IsResourceExhausted(full.status()));
}

TEST(BlockMessageTest, MutatedMessagesReadAsProtobufReadsThem) {
  testing::SilenceProtobuf();
  v1::StoreWriteRequest last;
  last.set_offset(6);
  last.set_crc32c(1);
  last.set_finish(true);
  const v1::StoreWriteRequest prototype;
  testing::FuzzTarget target = {.name = "block-message"};
  target.seeds = {Block("abcdef").SerializeAsString(), last.SerializeAsString()};
  target.mutate = testing::MessageMutation(prototype, target.seeds, {"team/job"});
  const testing::FuzzCounts counts = testing::Fuzz(target, [](std::string_view input) {
    Memory memory;
    const size_t piece = 1 + input.size() % 13;
    const auto block = ReadBlockMessage(Slices(input, piece), kWrittenBlock, memory.room());
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
}  // namespace ravel::store
