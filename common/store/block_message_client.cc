// A block is sent as two slices: the fields before `data` with its tag and length, and the bytes.
// The slice of the bytes owns its memory through a function that gives it back to the pool.

#include "common/store/block_message_client.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/mutex.h"
#include "common/signed_size.h"

namespace ravel::store {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr size_t kAlignment = 4096;
constexpr size_t kSmallBytes = 64 << 10;  // not worth the memory of a whole block
constexpr size_t kPartBytes = 128 << 10;  // copied, and summed while the cache has it

absl::Status NoMessage() {
  return absl::InvalidArgumentError("block: expected a message of the store");
}

bool Is(uint32_t tag, int field, WireFormatLite::WireType type) {
  return field != 0 && tag == WireFormatLite::MakeTag(field, type);
}

absl::Status ReadData(CodedInputStream& input, const RoomForBlock& room, BlockMessage& block) {
  uint32_t bytes = 0;
  if (!input.ReadVarint32(&bytes)) {
    return NoMessage();
  }
  if (bytes > kStoreBlockBytes || !block.data.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: expected at most ", kStoreBlockBytes, " bytes, once"));
  }
  if (bytes == 0) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::span<char> memory, room(bytes));
  for (size_t at = 0; at < memory.size(); at += kPartBytes) {
    const auto part = memory.subspan(at, std::min(kPartBytes, memory.size() - at));
    if (!input.ReadRaw(part.data(), static_cast<int>(part.size()))) {
      return NoMessage();
    }
    block.sum = Crc32c(block.sum, part.data(), part.size());
  }
  block.data = memory;
  return absl::OkStatus();
}

absl::Status ReadField(uint32_t tag,
                       const BlockFields& fields,
                       CodedInputStream& input,
                       const RoomForBlock& room,
                       BlockMessage& block) {
  if (Is(tag, fields.data, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
    return ReadData(input, room, block);
  }
  uint64_t value = 0;
  const bool varint = WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_VARINT;
  if (varint ? !input.ReadVarint64(&value) : !WireFormatLite::SkipField(&input, tag)) {
    return NoMessage();
  }
  if (Is(tag, fields.offset, WireFormatLite::WIRETYPE_VARINT)) {
    block.offset = static_cast<int64_t>(value);
  } else if (Is(tag, fields.crc32c, WireFormatLite::WIRETYPE_VARINT)) {
    block.crc32c = static_cast<uint32_t>(value);
  } else if (Is(tag, fields.finish, WireFormatLite::WIRETYPE_VARINT)) {
    block.finish = value != 0;
  }
  return absl::OkStatus();
}

// gRPC's reader wants a buffer that it may change; it reads only.
grpc::ByteBuffer* Readable(const grpc::ByteBuffer& message) {
  return const_cast<grpc::ByteBuffer*>(&message);
}

// Copies, and returns the CRC-32C.
uint32_t CopyAndSum(std::span<const std::byte> from, std::byte* to) {
  uint32_t crc = 0;
  for (size_t at = 0; at < from.size(); at += kPartBytes) {
    const auto part = from.subspan(at, std::min(kPartBytes, from.size() - at));
    std::memcpy(to + at, part.data(), part.size());
    crc = Crc32c(crc, part.data(), part.size());
  }
  return crc;
}

// All that stands before the bytes.
grpc::Slice HeadOf(const OutgoingBlock& block) {
  v1::StoreWriteRequest fields;
  fields.set_offset(block.offset);
  fields.set_crc32c(block.crc32c);
  std::string head = fields.SerializeAsString();
  std::array<uint8_t, 2 * 5> more = {};  // two varints of 32 bits
  const uint32_t tag =
      WireFormatLite::MakeTag(kWrittenBlock.data, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  uint8_t* end = CodedOutputStream::WriteTagToArray(tag, more.data());
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(block.bytes), end);
  head.append(reinterpret_cast<const char*>(more.data()), Size(end - more.data()));
  return grpc::Slice(head);
}

std::string MethodName(std::string_view method) {
  return absl::StrCat("/", v1::Store::service_full_name(), "/", std::string(method));
}

}  // namespace

absl::StatusOr<BlockMessage> ReadBlockMessage(const grpc::ByteBuffer& message,
                                              const BlockFields& fields,
                                              const RoomForBlock& room) {
  grpc::ProtoBufferReader slices(Readable(message));
  if (!slices.status().ok()) {
    return NoMessage();
  }
  CodedInputStream input(&slices);
  BlockMessage block;
  for (;;) {
    const uint32_t tag = input.ReadTag();
    if (tag == 0) {
      break;
    }
    RETURN_IF_ERROR(ReadField(tag, fields, input, room, block));
  }
  if (!input.ConsumedEntireMessage() ||
      input.CurrentPosition() != static_cast<int64_t>(message.Length())) {
    return NoMessage();
  }
  return block;
}

absl::StatusOr<v1::StoreWriteRequest> ReadFirstMessage(const grpc::ByteBuffer& message) {
  grpc::ProtoBufferReader slices(Readable(message));
  v1::StoreWriteRequest first;
  if (!slices.status().ok() || !first.ParseFromZeroCopyStream(&slices)) {
    return NoMessage();
  }
  return first;
}

class BlockMemory::Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    for (std::byte* const memory : spare_) {
      std::free(memory);
    }
  }
  std::byte* Take() {
    const MutexLock lock(mutex_);
    if (!spare_.empty()) {
      std::byte* const memory = spare_.back();
      spare_.pop_back();
      return memory;
    }
    void* const fresh = std::aligned_alloc(kAlignment, Size(kStoreBlockBytes));
    CHECK(fresh != nullptr);
    return static_cast<std::byte*>(fresh);
  }
  void GiveBack(std::byte* memory) {
    const MutexLock lock(mutex_);
    spare_.push_back(memory);
  }
  size_t spare() const {
    const MutexLock lock(mutex_);
    return spare_.size();
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::byte*> spare_ ABSL_GUARDED_BY(mutex_);
};

// The memory of one block, which the slice of its bytes owns.
struct BlockMemory::Piece {
  std::shared_ptr<Pool> pool;
  std::byte* memory = nullptr;

  static void End(void* piece) {
    const std::unique_ptr<Piece> owned(static_cast<Piece*>(piece));
    owned->pool->GiveBack(owned->memory);
  }
};

BlockMemory::BlockMemory() : pool_(std::make_shared<Pool>()) {}

size_t BlockMemory::spare() const {
  return pool_->spare();
}

grpc::Slice BlockMemory::Take(size_t bytes) {
  if (bytes <= kSmallBytes) {
    return grpc::Slice(bytes);
  }
  auto piece = std::make_unique<Piece>();
  piece->pool = pool_;
  piece->memory = pool_->Take();
  std::byte* const memory = piece->memory;
  return {memory, bytes, &Piece::End, piece.release()};
}

OutgoingBlock BlockMemory::BlockOf(std::span<const std::byte> bytes, int64_t offset) {
  CHECK(!bytes.empty() && std::ssize(bytes) <= kStoreBlockBytes);
  grpc::Slice copy = Take(bytes.size());
  // Nobody else holds the slice yet.
  auto* const to = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(copy.begin()));
  OutgoingBlock block = {.offset = offset,
                         .bytes = std::ssize(bytes),
                         .crc32c = CopyAndSum(bytes, to),
                         .finish = false,
                         .message = {}};
  const std::array<grpc::Slice, 2> slices = {HeadOf(block), std::move(copy)};
  block.message = grpc::ByteBuffer(slices.data(), slices.size());
  return block;
}

OutgoingBlock LastBlock(int64_t size, uint32_t crc32c) {
  v1::StoreWriteRequest last;
  last.set_offset(size);
  last.set_crc32c(crc32c);
  last.set_finish(true);
  return {.offset = size, .bytes = 0, .crc32c = crc32c, .finish = true, .message = ToBytes(last)};
}

grpc::ByteBuffer ToBytes(const v1::StoreWriteRequest& request) {
  const grpc::Slice bytes(request.SerializeAsString());
  return {&bytes, 1};
}

std::unique_ptr<WriteStream> BeginWrite(grpc::ChannelInterface& channel,
                                        grpc::ClientContext& context) {
  static const auto* const name = new std::string(MethodName("Write"));
  const grpc::internal::RpcMethod method(name->c_str(), grpc::internal::RpcMethod::BIDI_STREAMING);
  return std::unique_ptr<WriteStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, v1::StoreWriteReply>::Create(
          &channel, method, &context));
}

std::unique_ptr<ReadStream> BeginRead(grpc::ChannelInterface& channel,
                                      grpc::ClientContext& context,
                                      const v1::StoreReadRequest& request) {
  static const auto* const name = new std::string(MethodName("Read"));
  const grpc::internal::RpcMethod method(name->c_str(),
                                         grpc::internal::RpcMethod::SERVER_STREAMING);
  return std::unique_ptr<ReadStream>(grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(
      &channel, method, &context, request));
}

}  // namespace ravel::store
