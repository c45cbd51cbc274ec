#pragma once

// Programs on queues of the host: each stream has a thread of its own, and only the program's waits
// order them, as on a device. What passes here in every schedule has all the waits that it needs.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "kernels/cpu_queue.h"
#include "worker/shard/host_replay.h"

namespace ravel::shard {

class QueuedReplay final : public HostReplay {
 public:
  // Each instruction is delayed by a random time of that schedule; none: no delays. The first
  // failure aborts `world`, since peers may wait for this rank's other streams.
  explicit QueuedReplay(comm::Communicator& world,
                        std::optional<uint64_t> delay_seed = std::nullopt)
      : world_(world), delay_seed_(delay_seed) {}

  absl::Status Run(const ProgramRun& program) override;

 private:
  comm::Communicator& world_;
  const std::optional<uint64_t> delay_seed_;
  std::array<std::unique_ptr<kernels::CpuQueue>, plan::kStreamCount> queues_;
  uint64_t runs_ = 0;
};

// EngineOptions::host_replay.
inline auto QueuedStreams(std::optional<uint64_t> delay_seed = std::nullopt) {
  return [delay_seed](comm::Communicator& world) -> std::unique_ptr<ReplayBackend> {
    return std::make_unique<QueuedReplay>(world, delay_seed);
  };
}

}  // namespace ravel::shard
