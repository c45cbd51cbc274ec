#include "worker/shard/host_state.h"

#include <cstring>
#include <utility>

#include "common/signed_size.h"

namespace ravel::shard {

absl::StatusOr<std::unique_ptr<HostState>> HostState::Create(int64_t bytes, const NumaNode& node) {
  const PreferNode prefer(node);
  absl::StatusOr<comm::PrivateMapping> memory = comm::PrivateMapping::Create(bytes);
  if (!memory.ok()) {
    return Annotate(memory.status(), kOffloadFractionField);
  }
  return std::unique_ptr<HostState>(new HostState(*std::move(memory), Size(bytes)));
}

bool HostState::Holds(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  return at >= memory_.data() && at < memory_.data() + bytes_;
}

absl::Status HostStateAccess::Read(const void* from, std::span<std::byte> to) {
  if (!state_.Holds(from)) {
    return device_.Read(from, to);
  }
  RETURN_IF_ERROR(streams_.FinishAll());
  std::memcpy(to.data(), from, to.size());
  return absl::OkStatus();
}

absl::Status HostStateAccess::Write(std::span<const std::byte> from, void* to) {
  if (!state_.Holds(to)) {
    return device_.Write(from, to);
  }
  RETURN_IF_ERROR(streams_.FinishAll());
  std::memcpy(to, from.data(), from.size());
  return absl::OkStatus();
}

}  // namespace ravel::shard
