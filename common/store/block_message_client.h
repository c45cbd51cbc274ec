#pragma once

// Messages that carry blocks of files, between ravel-store and its clients: as they are sent and
// kept, and as they arrive. A block's bytes are copied once on each side, between the memory of the
// caller and the slices of the network, and not through a protobuf string.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include <grpcpp/grpcpp.h>

#include "common/status.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store {

inline constexpr int64_t kStoreBlockBytes = 2 << 20;  // of one message, at most

// The numbers of a block's fields in a message; 0: it has none.
struct BlockFields {
  int offset = 0;
  int data = 0;
  int crc32c = 0;
  int finish = 0;
};
inline constexpr BlockFields kWrittenBlock = {.offset = v1::StoreWriteRequest::kOffsetFieldNumber,
                                              .data = v1::StoreWriteRequest::kDataFieldNumber,
                                              .crc32c = v1::StoreWriteRequest::kCrc32CFieldNumber,
                                              .finish = v1::StoreWriteRequest::kFinishFieldNumber};
inline constexpr BlockFields kReadBlock = {.offset = v1::StoreReadReply::kOffsetFieldNumber,
                                           .data = v1::StoreReadReply::kDataFieldNumber,
                                           .crc32c = v1::StoreReadReply::kCrc32CFieldNumber};

// A StoreWriteRequest but for `open`, or a StoreReadReply.
struct BlockMessage {
  int64_t offset = 0;
  std::span<const char> data;  // in the memory that `room` gave; empty: none
  uint32_t sum = 0;            // the CRC-32C of these bytes, taken while they were read
  uint32_t crc32c = 0;         // what the sender says that it is
  bool finish = false;
};

// Memory for a block of so many bytes, of 1 to kStoreBlockBytes.
using RoomForBlock = std::function<absl::StatusOr<std::span<char>>(int64_t bytes)>;

// Fields may come in any order; of `data` one may. InvalidArgument: no message, or a block that is
// too long; else an error of `room`. Leaves the slices to whom they belong. Thread-safe.
absl::StatusOr<BlockMessage> ReadBlockMessage(const grpc::ByteBuffer& message,
                                              const BlockFields& fields,
                                              const RoomForBlock& room);

// The first message of a stream of writes. InvalidArgument: it is none. Thread-safe.
absl::StatusOr<v1::StoreWriteRequest> ReadFirstMessage(const grpc::ByteBuffer& message);

// The wire's bytes of a block, and what its sender has to know of it. A message that is sent again
// is the same memory.
struct OutgoingBlock {
  int64_t offset = 0;
  int64_t bytes = 0;  // of the file
  uint32_t crc32c = 0;
  bool finish = false;
  grpc::ByteBuffer message;
};

// Memory of blocks, used again once neither gRPC nor a sender holds it: fresh pages cost more than
// the copy. Has as many blocks as were held at once. Thread-safe; blocks may outlive it.
class BlockMemory {
 public:
  BlockMemory();

  // A block of 1 to kStoreBlockBytes bytes, which are read once for the copy and the checksum.
  OutgoingBlock BlockOf(std::span<const std::byte> bytes, int64_t offset);
  // Blocks whose memory waits for its next use.
  size_t spare() const;

 private:
  struct Piece;
  class Pool;
  grpc::Slice Take(size_t bytes);

  std::shared_ptr<Pool> pool_;
};

// The last message of a file: its size and checksum.
OutgoingBlock LastBlock(int64_t size, uint32_t crc32c);
// `request` as it is sent.
grpc::ByteBuffer ToBytes(const v1::StoreWriteRequest& request);

// Calls of v1::Store whose blocks stay bytes; `context` outlives the stream.
using WriteStream = grpc::ClientReaderWriter<grpc::ByteBuffer, v1::StoreWriteReply>;
using ReadStream = grpc::ClientReader<grpc::ByteBuffer>;
std::unique_ptr<WriteStream> BeginWrite(grpc::ChannelInterface& channel,
                                        grpc::ClientContext& context);
std::unique_ptr<ReadStream> BeginRead(grpc::ChannelInterface& channel,
                                      grpc::ClientContext& context,
                                      const v1::StoreReadRequest& request);

}  // namespace ravel::store
