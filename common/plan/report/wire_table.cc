#include "common/plan/report/wire_table.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "common/check.h"
#include "common/model/segments.h"
#include "common/plan/layout/placement_move.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_uses.h"

namespace ravel::plan {

WireBytes& WireBytes::operator+=(const WireBytes& other) {
  gathers += other.gathers;
  reduces += other.reduces;
  outer_gathers += other.outer_gathers;
  outer_reduces += other.outer_reduces;
  tensor_gathers += other.tensor_gathers;
  tensor_reduces += other.tensor_reduces;
  return *this;
}

WireBytes WireBytes::operator*(int64_t times) const {
  return {.gathers = gathers * times,
          .reduces = reduces * times,
          .outer_gathers = outer_gathers * times,
          .outer_reduces = outer_reduces * times,
          .tensor_gathers = tensor_gathers * times,
          .tensor_reduces = tensor_reduces * times};
}

bool RoundsGradients(const ShardingPlan& plan) {
  return plan.options.gradient_wire == WireType::kBF16 && !plan.lanes.blocks;
}

namespace {

// Bytes of what a gather of activations makes whole: of the residual stream, or statistics of the
// vocabulary.
int64_t GatheredBytes(const ShardingPlan& plan, const Instruction& at) {
  const ModelInventory& inventory = plan.inventory;
  const UnitSpec& unit = inventory.units[at.unit];
  if (unit.kind == UnitKind::kHead) {
    const SegmentUse target = SegmentsOfStep(inventory, at).front().target;
    const ActivationSpec* spec = FindActivation(unit.workspace, target.name);
    CHECK_MSG(spec != nullptr, "a head gathers into its workspace");
    return ElementCount(spec->shape) * DTypeBytes(spec->dtype);
  }
  return AddendElements(inventory) * DTypeBytes(plan.options.weight_type);
}

// An exchange of the addends' own rows, and the rows of others; or one of the two.
WireBytes ActivationWire(const ShardingPlan& plan, const Instruction& at) {
  const ModelInventory& inventory = plan.inventory;
  const int64_t ranks = TensorRanks(inventory);
  const auto of_others = [&](int64_t bytes) { return bytes / ranks * (ranks - 1); };
  const SegmentMove move = MoveOfInstruction(plan.moves, at);
  const SegmentSpec segment = SegmentsOfStep(inventory, at).front();
  const int64_t elements = AddendElements(inventory) / (segment.chunked ? segment.chunks : 1);
  WireBytes wire;
  if (ExchangesAddends(move)) {
    wire.tensor_reduces = of_others(elements * DTypeBytes(DType::kF32));
  }
  if (move == SegmentMove::kSumRows) {
    wire.tensor_gathers = of_others(elements * DTypeBytes(plan.options.weight_type));
  } else if (move == SegmentMove::kGather) {
    wire.tensor_gathers = of_others(GatheredBytes(plan, at));
  }
  return wire;
}

// visit(program, contributors, times) for the programs of a step.
template <typename Visit>
void ForEachRun(const ShardingPlan& plan, const Visit& visit) {
  // Runs of each program in a step, by number of contributors: few pairs, however many turns.
  std::map<std::pair<const StepProgram*, int64_t>, int64_t> runs;
  const LaneMap inner = plan.lanes.Inner();
  for (int64_t index = 0; index < plan.lanes.programs(); ++index) {
    const StepSlot slot = SlotOf(plan.lanes, index);
    ++runs[{&plan.program(slot.phase, slot.part),
            inner.LaneCount(plan.lanes.blocks ? 0 : slot.turn)}];
  }
  for (const auto& [run, times] : runs) {
    visit(*run.first, run.second, times);
  }
}

}  // namespace

int64_t ReceivedBytes(const ShardingPlan& plan, const Instruction& at, int64_t contributors) {
  if (IsCompute(at.op) && at.move >= 0) {
    return ActivationWire(plan, at).total();
  }
  if (at.group < 0 || !IsCollective(at.op)) {
    return 0;
  }
  const ProgramMove& move = plan.moves.moves[at.move];
  const GroupLayout& group = plan.groups[at.group];
  const int64_t elements = group.layout.total_elements();
  const int64_t bytes = move.of == MoveOf::kWeights ? WeightBytes(group, plan.options, elements)
                                                    : elements * DTypeBytes(move.type);
  const int64_t of_all = MoveBytes(move.move, plan.mesh, bytes, 1);
  const int64_t others = std::max<int64_t>(1, move.move.axis_size - 1);
  return SumsLanes(move) ? of_all / others * (contributors - 1) : of_all;
}

WireBytes WireOf(const ShardingPlan& plan, const Instruction& at, int64_t contributors) {
  WireBytes wire;
  if (IsCompute(at.op) && at.move >= 0) {
    return ActivationWire(plan, at);
  }
  if (at.group < 0 || !IsCollective(at.op)) {
    return wire;
  }
  const BufferId gathered = BufferOf(at, Role::kWeights);
  if (gathered >= 0 && plan.buffers[gathered].memory == MemoryKind::kCommon) {
    return wire;
  }
  const ProgramMove& move = plan.moves.moves[at.move];
  const bool weights = move.of == MoveOf::kWeights;
  int64_t& moved = SumsAddends(move) ? wire.tensor_reduces
                   : IsInnermost(plan.mesh, move)
                       ? (weights ? wire.gathers : wire.reduces)
                       : (weights ? wire.outer_gathers : wire.outer_reduces);
  moved = ReceivedBytes(plan, at, contributors);
  return wire;
}

IdVector<GroupId, WireBytes> WireTable(const ShardingPlan& plan) {
  IdVector<GroupId, WireBytes> table(plan.groups.size());
  ForEachRun(plan, [&](const StepProgram& program, int64_t contributors, int64_t times) {
    for (const Instruction& at : program.instructions) {
      if (at.group >= 0) {
        table[at.group] += WireOf(plan, at, contributors) * times;
      }
    }
  });
  return table;
}

int64_t RoundedInPlaceBytes(const ShardingPlan& plan) {
  if (!RoundsGradients(plan)) {
    return 0;
  }
  // Read as fp32, written as bf16.
  const int64_t traffic = DTypeBytes(kGradientType) + DTypeBytes(DType::kBF16);
  int64_t bytes = 0;
  for (int64_t index = 0; index < plan.lanes.programs(); ++index) {
    const StepSlot slot = SlotOf(plan.lanes, index);
    for (const Instruction& at : plan.program(slot.phase, slot.part).instructions) {
      if (at.op == OpCode::kReduce && SumsLanes(plan.moves.moves[at.move]) &&
          plan.buffers[BufferOf(at, Role::kSend)].dtype == kGradientType) {
        bytes += plan.groups[at.group].layout.total_elements() * traffic;
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
  if (TensorRanks(plan.inventory) > 1) {
    ForEachRun(plan, [&](const StepProgram& program, int64_t contributors, int64_t times) {
      for (const Instruction& at : program.instructions) {
        if (IsCompute(at.op)) {
          sum += WireOf(plan, at, contributors) * times;
        }
      }
    });
  }
  return sum;
}

}  // namespace ravel::plan
