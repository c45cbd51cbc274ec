#pragma once

// Messages of Store.Write as they arrive: the bytes of a block go from the slices of the network
// straight to where the disk takes them.

#include <cstdint>
#include <functional>
#include <span>

#include <grpcpp/support/byte_buffer.h>

#include "common/status.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store_server {

// A StoreWriteRequest but for `open`.
struct BlockMessage {
  int64_t offset = 0;
  std::span<const char> data;  // in the memory that `room` gave; empty: none
  uint32_t crc32c = 0;
  bool finish = false;
};

// Memory for a block of so many bytes, of 1 to kUploadBlockBytes.
using RoomForBlock = std::function<absl::StatusOr<std::span<char>>(int64_t bytes)>;

// Fields may come in any order; of `data` one may. InvalidArgument: no message, or a block that is
// too long; else an error of `room`. Leaves the slices to whom they belong.
absl::StatusOr<BlockMessage> ReadBlockMessage(const grpc::ByteBuffer& message,
                                              const RoomForBlock& room);

// The first message of a stream.
absl::StatusOr<v1::StoreWriteRequest> ReadFirstMessage(const grpc::ByteBuffer& message);

}  // namespace ravel::store_server
