// The list of all buffers of a plan: one for each group, role and call, with element type, size and
// memory. Two buffers are one memory only where one says that it lies `inside` the other.

#include "common/plan/program/program_buffers.h"

#include <algorithm>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/recipes.h"
#include "common/plan/layout/quant_layout.h"
#include "common/plan/layout/state_scales.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/program/program_uses.h"

namespace ravel::plan {
namespace {

class BufferList {
 public:
  explicit BufferList(const ProgramRequest& request)
      : request_(request),
        uses_(UsesOf(request.inventory, request.groups, true)),
        peers_(request.options.read_peers_in_place ? MemoryKind::kSymmetric
                                                   : MemoryKind::kPrivate) {}

  ProgramBuffers Build() {
    IdVector<UnitId, std::vector<GroupId>> groups_of(request_.inventory.units.size());
    for (const GroupId group : request_.groups.ids()) {
      groups_of[request_.groups[group].unit].push_back(group);
    }
    NameGroups(groups_of);
    for (const UnitId unit : groups_of.ids()) {
      for (const GroupId group : groups_of[unit]) {
        AddWeights(group);
      }
      AddActivations(unit);
    }
    for (const GradientCall& call : uses_.gradients) {
      AddGradients(call);
    }
    AddQuantization();
    AddActivationMoves();
    buffers_.Add({.name = "shared",
                  .kind = BufferKind::kShared,
                  .bytes = ActivationOffsets(request_.inventory.shared).back(),
                  .persistent = true});
    return std::move(buffers_);
  }

 private:
  // "layers.0", or "layers.0:1" of the second of several groups.
  void NameGroups(const IdVector<UnitId, std::vector<GroupId>>& groups_of) {
    names_.resize(request_.groups.size());
    for (const UnitId unit : groups_of.ids()) {
      const std::vector<GroupId>& groups = groups_of[unit];
      for (size_t i = 0; i < groups.size(); ++i) {
        const std::string& name = request_.inventory.units[unit].name;
        names_[groups[i]] = groups.size() == 1 ? name : absl::StrCat(name, ":", i);
      }
    }
  }

  ProgramBuffer OfGroup(
      const char* role, BufferKind kind, GroupId group, int64_t elements, DType dtype) const {
    return {.name = absl::StrCat(role, "/", names_[group]),
            .kind = kind,
            .unit = request_.groups[group].unit,
            .group = group,
            .bytes = elements * DTypeBytes(dtype),
            .dtype = dtype};
  }
  // The buffer of one gradient call of a group.
  ProgramBuffer OfCall(const char* role,
                       BufferKind kind,
                       const GradientCall& call,
                       int64_t elements,
                       DType dtype = kGradientType) const {
    ProgramBuffer buffer = OfGroup(role, kind, call.group, elements, dtype);
    if (call.call > 0) {
      absl::StrAppend(&buffer.name, ".call", call.call);
    }
    buffer.call = call.call;
    return buffer;
  }

  const GroupMoves& MovesOf(GroupId group) const { return request_.moves.of_groups[group]; }
  int64_t TotalElements(GroupId group) const {
    return request_.groups[group].layout.total_elements();
  }
  int64_t ShardElements(GroupId group) const {
    return TotalElements(group) / request_.lanes.width();
  }

  void AddWeights(GroupId group) {
    const std::vector<MoveId>& moves = MovesOf(group).weights;
    const bool trainable = request_.groups[group].trainable;
    const bool resident = IsResident(request_, group);
    const DType weight_type = WeightTypeOf(request_.groups[group], request_.options);
    const DType main_type = MainTypeOf(request_.groups[group], request_.options);
    const bool same_type = weight_type == main_type;
    const int64_t total = TotalElements(group);
    const auto weight_buffer = [&](const char* role, BufferKind kind, int64_t elements) {
      ProgramBuffer made = OfGroup(role, kind, group, elements, weight_type);
      made.bytes = WeightBytes(request_.groups[group], request_.options, elements);
      return made;
    };
    ProgramBuffer gathered = weight_buffer("gathered", BufferKind::kGathered, total);
    gathered.persistent = resident;
    if (resident && !moves.empty()) {
      gathered.memory = request_.options.gather_in_place ? MemoryKind::kCommon : peers_;
    }
    BufferId outer = buffers_.Add(gathered);
    // The number of ranks that the gather takes them from.
    const int64_t parts =
        moves.empty() ? 1 : CutCount(request_.moves.moves[moves.back()].move.before, request_.mesh);
    const auto add_inside =
        [&](const char* role, BufferKind kind, int64_t elements, BufferId inside) {
          ProgramBuffer weight = weight_buffer(role, kind, elements);
          weight.memory = inside >= 0 ? buffers_[inside].memory : peers_;
          weight.persistent = true;
          weight.inside = inside;
          return buffers_.Add(weight);
        };
    if (!resident) {
      outer = {};
    }
    if (!trainable || moves.size() > 1 || !same_type) {
      outer = add_inside("model_weight", BufferKind::kModelWeight, total / parts, outer);
    }
    const int64_t stored = total / CutCount(request_.roles[group].stored, request_.mesh);
    const auto add_own = [&](const char* role, BufferKind kind, DType dtype) {
      ProgramBuffer own = OfGroup(role, kind, group, stored, dtype);
      own.persistent = true;
      return buffers_.Add(own);
    };
    if (!same_type) {
      // Frozen groups have one too: a save then holds the bits that were loaded.
      add_own("main_weight", BufferKind::kMainWeight, main_type);
    } else if (trainable) {
      add_inside("main_weight", BufferKind::kMainWeight, stored, outer);
    }
    if (!trainable) {
      return;
    }
    int slot = 0;
    for (const StateSpec& state : BufferStatesOf(request_.options.optimizer)) {
      const DType dtype = StateTypeOf(state, request_.options.state_types);
      buffers_[add_own(state.name, BufferKind::kState, dtype)].slot = slot++;
    }
    AddScales(group);
  }

  void AddScales(GroupId group) {
    const ProgramOptions& options = request_.options;
    for (const StateSpec& state : StatesOf(options.optimizer, options.state_types)) {
      if (state.shape != StateShape::kScale) {
        continue;
      }
      ProgramBuffer scales = OfGroup(state.name,
                                     BufferKind::kStateScale,
                                     group,
                                     MostStateScales(request_.inventory,
                                                     request_.groups[group],
                                                     request_.mesh,
                                                     request_.roles[group].stored),
                                     DType::kU8);
      scales.persistent = true;
      scales.slot = state.scales;
      buffers_.Add(scales);
    }
  }

  void AddActivations(UnitId unit) {
    const UnitSpec& spec = request_.inventory.units[unit];
    const auto add =
        [&](const char* role, BufferKind kind, int call, const std::vector<ActivationSpec>& specs) {
          if (!specs.empty()) {
            buffers_.Add({.name = absl::StrCat(
                              role, "/", spec.name, call > 0 ? absl::StrCat(".", call) : ""),
                          .kind = kind,
                          .unit = unit,
                          .call = call,
                          .bytes = ActivationOffsets(specs).back()});
          }
        };
    for (int call = 0; call < CallsOf(request_.inventory, unit); ++call) {
      add("saved", BufferKind::kSaved, call, spec.saved);
    }
    add("remade", BufferKind::kRemade, 0, spec.remade);
    add("workspace", BufferKind::kWorkspace, 0, spec.workspace);
    if (!spec.leaves.empty()) {
      buffers_.Add({.name = absl::StrCat("leaves/", spec.name),
                    .kind = BufferKind::kLeaves,
                    .unit = unit,
                    .bytes = ActivationOffsets(spec.leaves).back(),
                    .persistent = true});
    }
  }

  struct Counter {
    explicit Counter(const LaneMap& lanes)
        : root(CounterRoot(lanes)), slots(CounterBuffers(lanes)) {}
    int root;
    int slots;
  };

  void AddCounter(const GradientCall& call,
                  BufferKind kind,
                  const Counter& counter,
                  bool peers_read_root) {
    const bool local = kind == BufferKind::kLocalGrad;
    for (int slot = 0; slot < counter.slots; ++slot) {
      ProgramBuffer buffer = OfCall(local ? "local_grad" : "main_grad",
                                    kind,
                                    call,
                                    local ? TotalElements(call.group) : ShardElements(call.group));
      absl::StrAppend(&buffer.name, ".", slot);
      buffer.memory = peers_read_root && slot == counter.root ? peers_ : MemoryKind::kPrivate;
      buffer.slot = slot;
      buffer.persistent = true;
      buffers_.Add(buffer);
    }
  }

  void AddGradients(const GradientCall& call) {
    const GroupMoves& moves = MovesOf(call.group);
    const bool cuts_sums = CutsSums(request_.moves, call.group);
    const LaneMap& lanes = request_.lanes;
    const bool replicas = lanes.replicas > 1;
    if (moves.each_turn.empty()) {
      AddCounter(call, BufferKind::kLocalGrad, local_, true);
    }
    const bool in_sum = StagedInSum(lanes) && !moves.each_turn.empty();
    AddCounter(call, BufferKind::kMainGrad, inner_, replicas || !moves.whole.empty() || in_sum);
    const BufferId sum_of_lane = buffers_.last_id();
    const DType staged = StagedType(lanes, request_.options, call);
    const int64_t total = TotalElements(call.group);
    ProgramBuffer staging = OfCall("staging", BufferKind::kStaging, call, total, staged);
    const bool peers_read = !moves.each_turn.empty() || !moves.each_lane.empty();
    staging.memory = peers_read ? peers_ : MemoryKind::kPrivate;
    staging.persistent = lanes.micro_batches > 1;
    staging.inside = in_sum ? sum_of_lane : BufferId();
    buffers_.Add(staging);
    const bool received = !request_.options.read_peers_in_place;
    if (received) {
      buffers_.Add(OfCall("receive", BufferKind::kReceive, call, total, staged));
    }
    for (const MoveId move : moves.each_lane) {
      ProgramBuffer sum = OfCall("tensor_sum",
                                 BufferKind::kTensorSum,
                                 call,
                                 DivExact(total, request_.moves.moves[move].move.axis_size));
      sum.memory = peers_;
      buffers_.Add(sum);
      if (received) {
        buffers_.Add(OfCall("tensor_receive", BufferKind::kTensorReceive, call, total));
      }
    }
    if (replicas) {
      ProgramBuffer sum = OfCall(
          "outer_grad", BufferKind::kOuterGrad, call, ShardElements(call.group) / lanes.replicas);
      sum.memory = cuts_sums ? MemoryKind::kPrivate : peers_;
      sum.persistent = cuts_sums;
      buffers_.Add(sum);
      if (received) {
        buffers_.Add(
            OfCall("outer_receive", BufferKind::kOuterReceive, call, ShardElements(call.group)));
      }
    }
    if (!moves.whole.empty() && call.call == 0) {
      buffers_.Add(OfCall("full_grad", BufferKind::kFullGrad, call, total));
    }
  }

  void AddOfAll(const char* name, BufferKind kind, MemoryKind memory, int64_t words, DType dtype) {
    if (words > 0) {
      buffers_.Add({.name = name,
                    .kind = kind,
                    .memory = memory,
                    .bytes = words * DTypeBytes(dtype),
                    .dtype = dtype,
                    .persistent = true});
    }
  }

  void AddQuantization() {
    const QuantLayout layout = QuantLayoutOf(request_.inventory);
    const QuantWords words =
        QuantWordsOf(layout, request_.options.ranks, request_.options.amax_history);
    AddOfAll("amax", BufferKind::kAmax, peers_, words.amax, DType::kU32);
    AddOfAll("amax_part", BufferKind::kAmaxPart, peers_, words.part, DType::kU32);
    if (!request_.options.read_peers_in_place) {
      AddOfAll(
          "amax_receive", BufferKind::kAmaxReceive, MemoryKind::kPrivate, words.amax, DType::kU32);
    }
    AddOfAll("delayed_scales",
             BufferKind::kDelayedScales,
             MemoryKind::kPrivate,
             words.scales,
             DType::kF32);
    AddOfAll("amax_flags", BufferKind::kAmaxFlags, MemoryKind::kPrivate, words.flags, DType::kU32);
  }

  // Buffers of all units: a rank's addend of sums of activations, and its rows of a gather.
  void AddActivationMoves() {
    const int64_t words = AddendElements(request_.inventory);
    AddOfAll("addend", BufferKind::kAddend, peers_, words, DType::kF32);
    for (int slot = 1; slot <= 2; ++slot) {
      const int64_t of_chunk = AddendElements(request_.inventory, slot);
      AddOfAll(
          slot == 1 ? "addend.1" : "addend.2", BufferKind::kAddend, peers_, of_chunk, DType::kF32);
      if (of_chunk > 0) {
        buffers_[buffers_.last_id()].slot = slot;
      }
    }
    if (!request_.options.read_peers_in_place) {
      AddOfAll(
          "addend_receive", BufferKind::kAddendReceive, MemoryKind::kPrivate, words, DType::kF32);
    }
    AddOfAll("rows", BufferKind::kRows, peers_, RowsBytes(request_.inventory), DType::kU8);
    AddOfAll("input_gradient",
             BufferKind::kInputGradient,
             MemoryKind::kPrivate,
             InputGradientBytes(request_.inventory),
             DType::kU8);
  }

  const ProgramRequest& request_;
  const ModelUses uses_;
  const Counter local_ = Counter(request_.lanes.Local());
  const Counter inner_ = Counter(request_.lanes.Inner());
  const MemoryKind peers_;  // of what other ranks of the host read where they can
  IdVector<GroupId, std::string> names_;
  ProgramBuffers buffers_;
};

}  // namespace

bool IsResident(const ProgramRequest& request, GroupId group) {
  const GroupRoles& roles = request.roles[group];
  return roles.parameter == roles.used ||
         (request.options.gather_in_place && !request.moves.of_groups[group].weights.empty());
}

DType WeightTypeOf(const GroupLayout& group, const ProgramOptions& options) {
  return group.recipe == Recipe::kNone ? options.weight_type : CodeType(group.recipe);
}

DType MainTypeOf(const GroupLayout& group, const ProgramOptions& options) {
  return group.recipe == Recipe::kNone ? options.main_type : DType::kF32;
}

int64_t WeightBytes(const GroupLayout& group, const ProgramOptions& options, int64_t elements) {
  return group.recipe == Recipe::kNone ? elements * DTypeBytes(options.weight_type)
                                       : CodeBytes(group.recipe, elements);
}

DType StagedType(const LaneMap& lanes, const ProgramOptions& options, const GradientCall& call) {
  const bool leaves = lanes.micro_batches == 1 && !lanes.blocks;
  return leaves && call.written_once ? options.staged_type : kGradientType;
}

bool StagedInSum(const LaneMap& lanes) {
  return lanes.micro_batches > 1 && lanes.Inner().lanes == 1;
}

int64_t AddendElements(const ModelInventory& inventory) {
  return TensorRanks(inventory) == 1 ? 0 : ElementCount(StreamShape(inventory));
}

int64_t AddendElements(const ModelInventory& inventory, int slot) {
  const int64_t all = AddendElements(inventory);
  return slot == 0 ? all : inventory.cut.chunks == 1 ? 0 : DivCeil(all, inventory.cut.chunks);
}

int64_t RowsBytes(const ModelInventory& inventory) {
  if (TensorRanks(inventory) == 1) {
    return 0;
  }
  const auto bytes = [](const ActivationSpec* spec) {
    return spec == nullptr ? 0 : ElementCount(spec->shape) * DTypeBytes(spec->dtype);
  };
  const ActivationSpec* hidden = FindActivation(inventory.shared, "hidden");
  CHECK_MSG(hidden != nullptr, "units hand `hidden` to each other");
  int64_t most = AddendElements(inventory) * DTypeBytes(hidden->dtype);
  for (const UnitSpec& unit : inventory.units) {
    most = std::max(most, bytes(FindActivation(unit.workspace, "vocabulary")));
  }
  return DivExact(most, TensorRanks(inventory));
}

int64_t InputGradientBytes(const ModelInventory& inventory) {
  if (TensorRanks(inventory) == 1) {
    return 0;
  }
  const ActivationSpec& spec = InputGradientSpec(inventory);
  return ElementCount(spec.shape) * DTypeBytes(spec.dtype);
}

ProgramBuffers BuildBuffers(const ProgramRequest& request) {
  ProgramBuffers buffers = BufferList(request).Build();
  OffloadState(request, buffers);
  return buffers;
}

}  // namespace ravel::plan
