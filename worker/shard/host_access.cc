#include "worker/shard/host_access.h"

#include <cstring>

namespace ravel::shard {

absl::Status HostMemoryAccess::Read(const void* from, std::span<std::byte> to) {
  std::memcpy(to.data(), from, to.size());
  return absl::OkStatus();
}

absl::Status HostMemoryAccess::Write(std::span<const std::byte> from, void* to) {
  std::memcpy(to, from.data(), from.size());
  return absl::OkStatus();
}

}  // namespace ravel::shard
