// K11, K12, K13, K14 of what is offloaded: what is where, and on how many ranks.

#include "common/plan/check/plan_places.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/plan/layout/quant_layout.h"
#include "common/plan/layout/state_scales.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/program_buffers.h"

namespace ravel::plan {
namespace {

constexpr int64_t kOffsetAlignment = 256;

int64_t ArenaBytesOf(const BufferPlan& memory, MemoryKind kind) {
  return kind == MemoryKind::kPrivate     ? memory.private_bytes
         : kind == MemoryKind::kSymmetric ? memory.symmetric_bytes
         : kind == MemoryKind::kOffload   ? memory.offload_bytes
                                          : memory.common_bytes;
}

absl::Status Fault(const ProgramBuffer& buffer, const char* rule, const char* what) {
  return absl::FailedPreconditionError(absl::StrCat(rule, ": ", buffer.name, " ", what));
}

// K12: staging is the sum over lanes only where it is staged for one lane, of one rank, in the type
// of sums: nothing else is ever added there.
absl::Status CheckStagedInSum(const ShardingPlan& plan, BufferId id) {
  const ProgramBuffer& staging = plan.buffers[id];
  const ProgramBuffer& sum = plan.buffers[staging.inside];
  if (!StagedInSum(plan.lanes) || sum.kind != BufferKind::kMainGrad || sum.inside >= 0 ||
      staging.group != sum.group || staging.call != sum.call || staging.dtype != sum.dtype ||
      staging.memory != sum.memory || !staging.persistent || !sum.persistent ||
      staging.bytes != sum.bytes ||
      plan.memory.offsets[id] != plan.memory.offsets[staging.inside]) {
    return Fault(staging, "K12", "is not the sum over lanes that it is inside");
  }
  return absl::OkStatus();
}

// K12: what lies inside another buffer is a part of it, of equal size on all ranks that share it:
// ranks write their own part, and no other.
absl::Status CheckNesting(const ShardingPlan& plan, BufferId id) {
  const ProgramBuffer& inner = plan.buffers[id];
  const BufferId outer_id = inner.inside;
  if (outer_id >= id) {  // also: no circle
    return Fault(inner, "K12", "is not inside an earlier buffer");
  }
  if (inner.kind == BufferKind::kStaging) {
    return CheckStagedInSum(plan, id);
  }
  const ProgramBuffer& outer = plan.buffers[outer_id];
  const bool of_replicas = outer.kind == BufferKind::kModelWeight;
  const int64_t parts = of_replicas ? plan.lanes.replicas : plan.lanes.width();
  const bool whole = CutAxes(plan.roles[inner.group].stored).empty();
  const bool stored =
      inner.kind == BufferKind::kMainWeight || inner.kind == BufferKind::kModelWeight;
  if (!stored || inner.group != outer.group || inner.memory != outer.memory ||
      inner.persistent != outer.persistent || inner.bytes * (whole ? 1 : parts) != outer.bytes ||
      plan.memory.offsets[id] != plan.memory.offsets[outer_id]) {
    return Fault(inner, "K12", "is not a rank's part of the buffer that it is inside");
  }
  return absl::OkStatus();
}

struct Extent {
  int64_t begin = 0;
  int64_t end = 0;
  BufferId buffer = {};
};

// Persistent buffers share their bytes with nobody; `extents` are those of one arena.
absl::Status CheckApart(const ShardingPlan& plan, std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.begin < b.begin;
  });
  int64_t end = 0;             // of all buffers before
  int64_t persistent_end = 0;  // of the persistent ones
  for (const Extent& extent : extents) {
    const ProgramBuffer& buffer = plan.buffers[extent.buffer];
    if (extent.begin < (buffer.persistent ? end : persistent_end)) {
      return Fault(buffer, "K13", "shares bytes with another buffer");
    }
    end = std::max(end, extent.end);
    persistent_end = buffer.persistent ? std::max(persistent_end, extent.end) : persistent_end;
  }
  return absl::OkStatus();
}

// K11: what the ranks measure is each element of each tensor once.
absl::Status CheckStatistics(const ShardingPlan& plan) {
  for (const GroupId group : plan.groups.ids()) {
    std::vector<ElementRange> ranges;
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      const ElementRange measured = MeasuredRange(plan, group, rank);
      const ElementRange stored = StoredRange(plan, group, rank);
      if (measured.begin < stored.begin || measured.end > stored.end) {
        return absl::FailedPreconditionError(absl::StrCat(
            "K11: group ", group.value(), ": rank ", rank, " measures what it does not have"));
      }
      if (Counts(plan, group, rank)) {
        ranges.push_back(measured);
      }
    }
    std::sort(ranges.begin(), ranges.end(), [](const ElementRange& a, const ElementRange& b) {
      return a.begin < b.begin;
    });
    int64_t end = 0;
    for (const ElementRange& range : ranges) {
      end = range.begin == end ? range.end : -1;
    }
    if (end != plan.groups[group].layout.total_elements()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "K11: group ", group.value(), ": statistics do not count every element once"));
    }
  }
  return absl::OkStatus();
}

// Bytes of what a unit, or all of them, need for activations; -1: no such buffer.
int64_t ActivationBytes(const ModelInventory& inventory, const ProgramBuffer& buffer) {
  if (buffer.kind == BufferKind::kShared) {
    return ActivationOffsets(inventory.shared).back();
  }
  if (!inventory.units.Has(buffer.unit)) {
    return -1;
  }
  const UnitSpec& unit = inventory.units[buffer.unit];
  switch (buffer.kind) {
    case BufferKind::kSaved:
      return ActivationOffsets(unit.saved).back();
    case BufferKind::kRemade:
      return ActivationOffsets(unit.remade).back();
    case BufferKind::kWorkspace:
      return ActivationOffsets(unit.workspace).back();
    case BufferKind::kLeaves:
      return ActivationOffsets(unit.leaves).back();
    default:
      return -1;
  }
}

bool IsOfQuantization(BufferKind kind) {
  return kind == BufferKind::kAmax || kind == BufferKind::kAmaxPart ||
         kind == BufferKind::kAmaxReceive || kind == BufferKind::kDelayedScales ||
         kind == BufferKind::kAmaxFlags;
}

int64_t QuantizationBytes(const ShardingPlan& plan, BufferKind kind) {
  const QuantWords words =
      QuantWordsOf(QuantLayoutOf(plan.inventory), plan.options.ranks, plan.options.amax_history);
  const int64_t count = kind == BufferKind::kAmaxPart        ? words.part
                        : kind == BufferKind::kDelayedScales ? words.scales
                        : kind == BufferKind::kAmaxFlags     ? words.flags
                                                             : words.amax;
  return count * DTypeBytes(DType::kU32);
}

// Element type of a buffer of weights, moments or gradients.
DType TypeOf(const ShardingPlan& plan, const ModelUses& model, const ProgramBuffer& buffer) {
  const ProgramOptions& options = plan.options;
  switch (buffer.kind) {
    case BufferKind::kStaging:
    case BufferKind::kReceive: {
      const GradientCall* call = FindGradient(model, buffer.group, buffer.call);
      return call == nullptr ? kGradientType : StagedType(plan.lanes, options, *call);
    }
    case BufferKind::kGathered:
    case BufferKind::kModelWeight:
      return WeightTypeOf(plan.groups[buffer.group], options);
    case BufferKind::kMainWeight:
      return MainTypeOf(plan.groups[buffer.group], options);
    case BufferKind::kState:
      return StateBufferType(options, buffer.slot);
    case BufferKind::kStateScale:
      return DType::kU8;
    default:
      return kGradientType;
  }
}

absl::Status CheckState(const ProgramOptions& options, const ProgramBuffer& buffer) {
  const bool scales = buffer.kind == BufferKind::kStateScale;
  if (buffer.kind != BufferKind::kState && !scales) {
    return absl::OkStatus();
  }
  const auto states = static_cast<int>(BufferStatesOf(options.optimizer).size());
  if (buffer.slot < 0 || buffer.slot >= states) {
    return Fault(buffer, "K13", "is no state of the optimizer");
  }
  return scales && !IsFp8State(StateBufferType(options, buffer.slot))
             ? Fault(buffer, "K13", "scales a state that is not fp8")
             : absl::OkStatus();
}

absl::Status CheckOfNoGroup(const ShardingPlan& plan, const ProgramBuffer& buffer) {
  if (IsOfQuantization(buffer.kind)) {
    return buffer.bytes == QuantizationBytes(plan, buffer.kind)
               ? absl::OkStatus()
               : Fault(buffer, "K13", "is not of the size that the recipe needs");
  }
  if (buffer.kind == BufferKind::kAddend || buffer.kind == BufferKind::kAddendReceive) {
    const int slot = std::clamp(buffer.slot, 0, 2);
    return buffer.bytes == AddendElements(plan.inventory, slot) * DTypeBytes(DType::kF32) &&
                   buffer.dtype == DType::kF32
               ? absl::OkStatus()
               : Fault(buffer, "K13", "is not of the size of an activation that ranks sum");
  }
  if (buffer.kind == BufferKind::kRows) {
    return buffer.bytes == RowsBytes(plan.inventory)
               ? absl::OkStatus()
               : Fault(buffer, "K13", "is not of the size of the rows that ranks gather");
  }
  if (buffer.kind == BufferKind::kInputGradient) {
    return buffer.bytes == InputGradientBytes(plan.inventory)
               ? absl::OkStatus()
               : Fault(buffer, "K13", "is not of the size of the residual stream");
  }
  return buffer.bytes == ActivationBytes(plan.inventory, buffer)
             ? absl::OkStatus()
             : Fault(buffer, "K13", "is not of the size that its unit needs");
}

// Bytes of so many elements of a group's buffer: codes may share a byte.
int64_t BytesOf(const ShardingPlan& plan, const ProgramBuffer& buffer, int64_t elements) {
  const bool weights =
      buffer.kind == BufferKind::kGathered || buffer.kind == BufferKind::kModelWeight;
  return weights ? WeightBytes(plan.groups[buffer.group], plan.options, elements)
                 : elements * DTypeBytes(buffer.dtype);
}

// Returns true if amaxes or codes are made by reading this operand, a main weight of a group with a
// recipe: by the host that has it.
bool MakesCodes(const ShardingPlan& plan, const Instruction& at, const Operand& operand) {
  const ProgramBuffer& buffer = plan.buffers[operand.buffer];
  return (at.op == OpCode::kAmaxReduce || at.op == OpCode::kRefreshWeights) &&
         operand.access == Access::kRead && buffer.kind == BufferKind::kMainWeight &&
         plan.groups.Has(buffer.group) && plan.groups[buffer.group].recipe != Recipe::kNone;
}

// K14 beyond evaluation: offloaded state stays, updates alone write it, and besides them only the
// instructions that make codes on a host read it.
absl::Status CheckOffload(const ShardingPlan& plan) {
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.memory == MemoryKind::kOffload && (!buffer.persistent || buffer.inside >= 0)) {
      return Fault(buffer, "K14", "is offloaded, but no state of its own");
    }
  }
  for (const StepProgram& program : plan.programs) {
    for (const Instruction& at : program.instructions) {
      for (const Operand& operand : at.operands) {
        const ProgramBuffer& buffer = plan.buffers[operand.buffer];
        if (buffer.memory == MemoryKind::kOffload && at.op != OpCode::kOptimizerStep &&
            !MakesCodes(plan, at, operand)) {
          return Fault(
              buffer, "K14", "is offloaded, and an instruction uses it that fetches nothing");
        }
      }
    }
  }
  return absl::OkStatus();
}

// Elements of the part of a gradient whose addends this rank sums; -1: there are no addends.
int64_t PartOfAddends(const ShardingPlan& plan, GroupId group) {
  const std::vector<MoveId>& moves = plan.moves.of_groups[group].each_lane;
  return moves.empty() ? -1
                       : DivExact(plan.groups[group].layout.total_elements(),
                                  plan.moves.moves[moves.front()].move.axis_size);
}

// Buffers have the sizes and types that units, layouts and roles say, and stay where those do.
absl::Status CheckSizes(const ShardingPlan& plan) {
  const ProgramRequest request = {.inventory = plan.inventory,
                                  .groups = plan.groups,
                                  .mesh = plan.mesh,
                                  .roles = plan.roles,
                                  .moves = plan.moves,
                                  .lanes = plan.lanes,
                                  .options = plan.options};
  const ModelUses model = UsesOf(plan.inventory, plan.groups, true);
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.group < 0) {
      RETURN_IF_ERROR(CheckOfNoGroup(plan, buffer));
      continue;
    }
    if (!plan.groups.Has(buffer.group) || buffer.unit != plan.groups[buffer.group].unit) {
      return Fault(buffer, "K13", "is of no group");
    }
    const int64_t total = plan.groups[buffer.group].layout.total_elements();
    const int64_t shard = total / plan.lanes.width();
    int64_t expected = 0;
    switch (buffer.kind) {
      case BufferKind::kGathered:
      case BufferKind::kStaging:
      case BufferKind::kReceive:
      case BufferKind::kLocalGrad:
      case BufferKind::kFullGrad:
      case BufferKind::kTensorReceive:
        expected = total;
        break;
      case BufferKind::kTensorSum:
        expected = PartOfAddends(plan, buffer.group);
        break;
      case BufferKind::kMainGrad:
      case BufferKind::kOuterReceive:
        expected = shard;
        break;
      case BufferKind::kOuterGrad:
        expected = shard / plan.lanes.replicas;
        break;
      case BufferKind::kModelWeight:
        expected = CutAxes(plan.roles[buffer.group].stored).empty() ? total : shard;
        break;
      case BufferKind::kStateScale:
        expected = MostStateScales(
            plan.inventory, plan.groups[buffer.group], plan.mesh, plan.roles[buffer.group].stored);
        break;
      default:
        expected = StoredRange(plan, buffer.group, 0).size();
        break;
    }
    RETURN_IF_ERROR(CheckState(plan.options, buffer));
    if (buffer.kind == BufferKind::kGathered &&
        buffer.persistent != IsResident(request, buffer.group)) {
      return Fault(buffer, "K13", "does not stay as the roles of its group say");
    }
    if (buffer.dtype != TypeOf(plan, model, buffer)) {
      return Fault(buffer, "K13", "is of another type than its kind");
    }
    if (buffer.bytes != BytesOf(plan, buffer, expected)) {
      return Fault(buffer, "K13", "is not of the size that its group needs");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPlaces(const ShardingPlan& plan) {
  RETURN_IF_ERROR(CheckSizes(plan));
  std::map<MemoryKind, std::vector<Extent>> extents;
  for (const BufferId i : plan.buffers.ids()) {
    const ProgramBuffer& buffer = plan.buffers[i];
    const int64_t begin = plan.memory.offsets[i];
    if (begin < 0 || begin % kOffsetAlignment != 0 || buffer.bytes < 0 ||
        begin + buffer.bytes > ArenaBytesOf(plan.memory, buffer.memory)) {
      return Fault(buffer, "K13", "is not aligned or not inside its arena");
    }
    if (buffer.inside >= 0) {
      RETURN_IF_ERROR(CheckNesting(plan, i));
    } else if (buffer.bytes > 0) {
      extents[buffer.memory].push_back({begin, begin + buffer.bytes, i});
    }
  }
  for (auto& [memory, arena] : extents) {
    RETURN_IF_ERROR(CheckApart(plan, std::move(arena)));
  }
  RETURN_IF_ERROR(CheckOffload(plan));
  return CheckStatistics(plan);
}

}  // namespace ravel::plan
