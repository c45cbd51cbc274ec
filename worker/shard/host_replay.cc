#include "worker/shard/host_replay.h"

#include <cstddef>
#include <cstring>
#include <span>

#include "common/plan/program/program_crossing.h"
#include "common/signed_size.h"
#include "worker/shard/lane_counter.h"

namespace ravel::shard {

absl::Status HostReplay::Run(const ProgramRun& program) {
  for (const BoundInstruction& bound : program.program.instructions) {
    if (plan::RunsOnStream(bound.instruction)) {
      RETURN_IF_ERROR(program.run(bound, 0));
    }
  }
  return absl::OkStatus();
}

void HostReplay::FillBytes(kernels::Stream&, void* to, uint8_t byte, int64_t bytes) {
  std::memset(to, byte, Size(bytes));
}

absl::Status HostReplay::ExchangeStatistics(comm::Communicator& world,
                                            const comm::CollectiveTag& tag,
                                            const StatisticsMessages& messages,
                                            kernels::Stream&) {
  const size_t words = Size(messages.words);
  return world.AllGatherBytes(
      tag,
      std::as_bytes(std::span<const int64_t>(messages.mine, words)),
      std::as_writable_bytes(std::span<int64_t>(messages.all, words * Size(world.size()))));
}

void* HostReplay::PackForWire(kernels::Stream&, float* staging, int64_t elements) {
  PackBf16(staging, elements);
  return staging;
}

}  // namespace ravel::shard
