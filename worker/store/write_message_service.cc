#include "worker/store/write_message_service.h"

#include <absl/strings/str_cat.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "common/signed_size.h"
#include "worker/store/upload.h"

namespace ravel::store_server {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

absl::Status NoMessage() {
  return absl::InvalidArgumentError("block: expected a StoreWriteRequest");
}

absl::Status ReadData(CodedInputStream& input, const RoomForBlock& room, BlockMessage& block) {
  uint32_t bytes = 0;
  if (!input.ReadVarint32(&bytes)) {
    return NoMessage();
  }
  if (bytes > kUploadBlockBytes || !block.data.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: expected at most ", kUploadBlockBytes, " bytes, once"));
  }
  if (bytes == 0) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::span<char> memory, room(bytes));
  if (!input.ReadRaw(memory.data(), static_cast<int>(bytes))) {
    return NoMessage();
  }
  block.data = memory;
  return absl::OkStatus();
}

absl::Status ReadField(uint32_t tag,
                       CodedInputStream& input,
                       const RoomForBlock& room,
                       BlockMessage& block) {
  using Request = v1::StoreWriteRequest;
  const auto tag_of = [](int field, WireFormatLite::WireType type) {
    return WireFormatLite::MakeTag(field, type);
  };
  if (tag == tag_of(Request::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
    return ReadData(input, room, block);
  }
  uint64_t value = 0;
  const bool varint = WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_VARINT;
  if (varint ? !input.ReadVarint64(&value) : !WireFormatLite::SkipField(&input, tag)) {
    return NoMessage();
  }
  if (tag == tag_of(Request::kOffsetFieldNumber, WireFormatLite::WIRETYPE_VARINT)) {
    block.offset = static_cast<int64_t>(value);
  } else if (tag == tag_of(Request::kCrc32CFieldNumber, WireFormatLite::WIRETYPE_VARINT)) {
    block.crc32c = static_cast<uint32_t>(value);
  } else if (tag == tag_of(Request::kFinishFieldNumber, WireFormatLite::WIRETYPE_VARINT)) {
    block.finish = value != 0;
  }
  return absl::OkStatus();
}

// gRPC's reader wants a buffer that it may change; it reads only.
grpc::ByteBuffer* Readable(const grpc::ByteBuffer& message) {
  return const_cast<grpc::ByteBuffer*>(&message);
}

}  // namespace

absl::StatusOr<BlockMessage> ReadBlockMessage(const grpc::ByteBuffer& message,
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
    RETURN_IF_ERROR(ReadField(tag, input, room, block));
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

}  // namespace ravel::store_server
