#include "common/plan/report/wire_table.h"

#include <cstddef>
#include <map>
#include <utility>

#include "common/plan/plan_pieces.h"

namespace ravel::plan {

WireBytes& WireBytes::operator+=(const WireBytes& other) {
  gathers += other.gathers;
  reduces += other.reduces;
  outer_gathers += other.outer_gathers;
  outer_reduces += other.outer_reduces;
  return *this;
}

WireBytes WireBytes::operator*(int64_t times) const {
  return {.gathers = gathers * times,
          .reduces = reduces * times,
          .outer_gathers = outer_gathers * times,
          .outer_reduces = outer_reduces * times};
}

bool RoundsGradients(const ShardingPlan& plan) {
  return plan.options.gradient_wire == WireType::kBF16 && !plan.lanes.blocks;
}

WireBytes WireOf(const ShardingPlan& plan, const Instruction& at, int64_t contributors) {
  WireBytes wire;
  if (at.group < 0) {
    return wire;
  }
  const GroupRules& rules = plan.rules[at.group];
  const int64_t others = plan.lanes.width() - 1;
  const int64_t other_replicas = plan.lanes.replicas - 1;
  const int64_t shard = InnerShardElements(plan, at.group);
  const int64_t weights = shard * DTypeBytes(plan.options.weight_type);
  const int64_t gradients = shard * kGradientElementBytes;
  if (at.op == OpCode::kGather) {
    const ProgramBuffer& gathered = plan.buffers[BufferOf(at, Role::kWeights)];
    wire.gathers = gathered.memory == MemoryKind::kCommon ? 0 : others * weights;
  } else if (at.op == OpCode::kReduceScatter) {
    wire.reduces = (contributors - 1) * (RoundsGradients(plan) ? gradients / 2 : gradients);
  } else if (at.op == OpCode::kGatherGradient) {
    wire.reduces = others * gradients;
  } else if (at.op == OpCode::kOuterGather) {
    wire.outer_gathers = other_replicas * (weights / plan.lanes.replicas);
  } else if (at.op == OpCode::kOuterReduce) {
    const int64_t part = gradients / plan.lanes.replicas;
    wire.outer_reduces = other_replicas * part * (rules.outer_gradient_sharded ? 1 : 2);
  }
  return wire;
}

IdVector<GroupId, WireBytes> WireTable(const ShardingPlan& plan) {
  // How often a step runs each program with so many contributors: few pairs, however many turns.
  std::map<std::pair<const StepProgram*, int64_t>, int64_t> runs;
  const LaneMap inner = plan.lanes.Inner();
  for (int64_t index = 0; index < plan.lanes.programs(); ++index) {
    const StepSlot slot = SlotOf(plan.lanes, index);
    ++runs[{&plan.program(slot.phase, slot.part),
            inner.LaneCount(plan.lanes.blocks ? 0 : slot.turn)}];
  }
  IdVector<GroupId, WireBytes> table(plan.groups.size());
  for (const auto& [run, times] : runs) {
    for (const Instruction& at : run.first->instructions) {
      if (at.group >= 0) {
        table[at.group] += WireOf(plan, at, run.second) * times;
      }
    }
  }
  return table;
}

int64_t RoundedInPlaceBytes(const ShardingPlan& plan) {
  if (!RoundsGradients(plan)) {
    return 0;
  }
  // Read as fp32, written as bf16.
  constexpr int64_t kTraffic = kGradientElementBytes + 2;
  int64_t bytes = 0;
  for (int64_t index = 0; index < plan.lanes.programs(); ++index) {
    const StepSlot slot = SlotOf(plan.lanes, index);
    for (const Instruction& at : plan.program(slot.phase, slot.part).instructions) {
      if (at.op == OpCode::kReduceScatter) {
        bytes += plan.groups[at.group].layout.total_elements() * kTraffic;
      }
    }
  }
  return bytes;
}

WireBytes StepWire(const ShardingPlan& plan) {
  WireBytes sum;
  for (const WireBytes& group : WireTable(plan)) {
    sum += group;
  }
  return sum;
}

}  // namespace ravel::plan
