#pragma once

// Reads and writes, for the host, memory of a rank's arena between its steps.

#include <cstddef>
#include <span>

#include "common/status.h"

namespace ravel::shard {

// Calls return when the bytes are there. Used only from the thread that issues the rank's work.
class HostAccess {
 public:
  virtual ~HostAccess() = default;
  // True where the host may also use the arena's addresses itself.
  virtual bool in_place() const = 0;
  // False for addresses that work of the streams cannot use: offloaded state of a device.
  virtual bool Reaches(const void*) const { return true; }
  // After all work that was issued on any stream.
  virtual absl::Status Read(const void* from, std::span<std::byte> to) = 0;
  // Before all work that is issued afterwards on any stream.
  virtual absl::Status Write(std::span<const std::byte> from, void* to) = 0;
  // The host has used these addresses of the arena itself, and will not for now.
  virtual absl::Status Settle(std::span<const std::byte>) { return absl::OkStatus(); }
};

// The access to an arena in host memory.
class HostMemoryAccess final : public HostAccess {
 public:
  bool in_place() const override { return true; }
  absl::Status Read(const void* from, std::span<std::byte> to) override;
  absl::Status Write(std::span<const std::byte> from, void* to) override;
};

}  // namespace ravel::shard
