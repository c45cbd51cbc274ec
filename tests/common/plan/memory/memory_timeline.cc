#include "tests/common/plan/memory/memory_timeline.h"

#include <algorithm>
#include <numeric>

#include "common/plan/program/program_order.h"

namespace ravel::plan {
namespace {

int64_t ShareOf(const ShardingPlan& plan, const ProgramBuffer& buffer) {
  const int64_t bytes = ArenaBytes(buffer);
  return buffer.memory == MemoryKind::kCommon ? DivCeil(bytes, plan.lanes.width()) : bytes;
}

}  // namespace

int64_t MemoryMoment::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

absl::StatusOr<std::vector<MemoryMoment>> MemoryTimeline(const ShardingPlan& plan,
                                                         Phase phase,
                                                         LanePart part) {
  const StepProgram& program = plan.program(phase, part);
  MemoryMoment always;
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.persistent) {
      always.bytes[static_cast<size_t>(buffer.kind)] += ShareOf(plan, buffer);
    }
  }
  std::vector<MemoryMoment> timeline(program.instructions.size(), always);
  ASSIGN_OR_RETURN(const std::vector<Lifetime> lives, LifetimesOf(program, plan.buffers));
  for (const Lifetime& life : lives) {
    const ProgramBuffer& buffer = plan.buffers[static_cast<size_t>(life.buffer)];
    for (auto at = std::max<InstructionId>(0, life.begin); at <= life.accesses.back(); ++at) {
      timeline[static_cast<size_t>(at)].bytes[static_cast<size_t>(buffer.kind)] +=
          ShareOf(plan, buffer);
    }
  }
  return timeline;
}

}  // namespace ravel::plan
