#include "worker/shard/device_access.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/signed_size.h"

namespace ravel::shard {

absl::StatusOr<std::unique_ptr<DeviceAccess>> DeviceAccess::Create(DeviceStreams& streams) {
  std::unique_ptr<DeviceAccess> access(new DeviceAccess(streams));
  for (size_t i = 0; i < access->pinned_.size(); ++i) {
    ASSIGN_OR_RETURN(access->pinned_[i], streams.gpu().AllocatePinned(kPieceBytes));
    ASSIGN_OR_RETURN(access->done_[i], streams.gpu().MakeEvent());
  }
  return access;
}

absl::Status DeviceAccess::Read(const void* from, std::span<std::byte> to) {
  streams_.Join();
  kernels::CudaStream& stream = streams_.compute();
  const auto* source = static_cast<const std::byte*>(from);
  const size_t piece = Size(kPieceBytes);
  const size_t pieces = (to.size() + piece - 1) / piece;
  const auto size_of = [&](size_t i) { return std::min(piece, to.size() - i * piece); };
  // The copy of the next piece runs while this one is taken out.
  for (size_t i = 0; i <= pieces; ++i) {
    if (i < pieces) {
      stream.CopyMemory(
          pinned_[i % 2].data(), source + i * piece, static_cast<int64_t>(size_of(i)));
      stream.Record(done_[i % 2]);
    }
    if (i > 0) {
      RETURN_IF_ERROR(streams_.WaitFor(done_[(i - 1) % 2]));
      std::memcpy(to.data() + (i - 1) * piece, pinned_[(i - 1) % 2].data(), size_of(i - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceAccess::Write(std::span<const std::byte> from, void* to) {
  streams_.Join();
  kernels::CudaStream& stream = streams_.compute();
  auto* target = static_cast<std::byte*>(to);
  const size_t piece = Size(kPieceBytes);
  const size_t pieces = (from.size() + piece - 1) / piece;
  for (size_t i = 0; i < pieces; ++i) {
    if (i >= 2) {
      RETURN_IF_ERROR(streams_.WaitFor(done_[i % 2]));
    }
    const size_t bytes = std::min(piece, from.size() - i * piece);
    std::memcpy(pinned_[i % 2].data(), from.data() + i * piece, bytes);
    stream.CopyMemory(target + i * piece, pinned_[i % 2].data(), static_cast<int64_t>(bytes));
    stream.Record(done_[i % 2]);
  }
  RETURN_IF_ERROR(streams_.Finish(stream));
  streams_.Join();
  return absl::OkStatus();
}

}  // namespace ravel::shard
