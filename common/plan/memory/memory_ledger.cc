#include "common/plan/memory/memory_ledger.h"

#include <algorithm>

#include "common/check.h"
#include "common/plan/program/program_order.h"

namespace ravel::plan {

const char* MemoryUseName(MemoryUse use) {
  switch (use) {
    case MemoryUse::kWeights:
      return "weights";
    case MemoryUse::kGradients:
      return "gradients";
    case MemoryUse::kOptimizer:
      return "optimizer state";
    case MemoryUse::kActivations:
      return "activations";
    case MemoryUse::kGathered:
      return "gathered";
    case MemoryUse::kStaging:
      return "staging";
    case MemoryUse::kWorkspace:
      return "workspace";
    case MemoryUse::kOffload:
      return "offloaded state";
  }
  return "unknown";
}

MemoryUse UseOf(const ProgramBuffer& buffer) {
  if (buffer.memory == MemoryKind::kOffload) {
    return MemoryUse::kOffload;
  }
  switch (buffer.kind) {
    case BufferKind::kMainWeight:
    case BufferKind::kModelWeight:
    case BufferKind::kAmax:
    case BufferKind::kAmaxPart:
    case BufferKind::kAmaxReceive:
    case BufferKind::kDelayedScales:
    case BufferKind::kAmaxFlags:
      return MemoryUse::kWeights;
    case BufferKind::kGathered:
      return buffer.persistent ? MemoryUse::kWeights : MemoryUse::kGathered;
    case BufferKind::kState:
    case BufferKind::kStateScale:
      return MemoryUse::kOptimizer;
    case BufferKind::kMainGrad:
    case BufferKind::kLocalGrad:
    case BufferKind::kOuterGrad:
    case BufferKind::kFullGrad:
    case BufferKind::kTensorSum:
    case BufferKind::kLeaves:
      return MemoryUse::kGradients;
    case BufferKind::kStaging:
    case BufferKind::kReceive:
    case BufferKind::kOuterReceive:
    case BufferKind::kTensorReceive:
      return buffer.persistent ? MemoryUse::kGradients : MemoryUse::kStaging;
    case BufferKind::kSaved:
    case BufferKind::kRemade:
    case BufferKind::kShared:
    case BufferKind::kAddend:
    case BufferKind::kAddendReceive:
    case BufferKind::kRows:
    case BufferKind::kInputGradient:
      return MemoryUse::kActivations;
    case BufferKind::kWorkspace:
      return MemoryUse::kWorkspace;
  }
  return MemoryUse::kWorkspace;
}

absl::StatusOr<BytesByUse> MostAlive(const ShardingPlan& plan) {
  IdVector<BufferId, int64_t> share(plan.buffers.size());
  BytesByUse always = {};
  for (const BufferId i : plan.buffers.ids()) {
    const ProgramBuffer& buffer = plan.buffers[i];
    share[i] = ArenaBytes(buffer);
    if (buffer.memory == MemoryKind::kCommon) {
      share[i] = DivCeil(share[i], plan.lanes.width());
    }
    always[static_cast<size_t>(UseOf(buffer))] += buffer.persistent ? share[i] : 0;
  }
  BytesByUse most = always;
  for (const StepProgram& program : plan.programs) {
    ASSIGN_OR_RETURN(const std::vector<Lifetime> lives, LifetimesOf(program, plan.buffers));
    IdVector<InstructionId, BytesByUse> alive(program.instructions.size(), always);
    for (const Lifetime& life : lives) {
      const auto use = static_cast<size_t>(UseOf(plan.buffers[life.buffer]));
      for (auto at = std::max<InstructionId>(0, life.begin); at <= life.accesses.back(); ++at) {
        alive[at][use] += share[life.buffer];
      }
    }
    for (const BytesByUse& moment : alive) {
      for (size_t use = 0; use < kMemoryUses; ++use) {
        most[use] = std::max(most[use], moment[use]);
      }
    }
  }
  return most;
}

}  // namespace ravel::plan
