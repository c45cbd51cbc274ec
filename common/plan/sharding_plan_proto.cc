// The half of the plan codec that is about ShardingPlan. A plan that is read is trusted with
// nothing: ids, sizes and overlaps are bounded, operands that follow from the plan must equal those
// it carries, and the checker proves the programs again. New fields have 0 or absent as the meaning
// they had before, and equal plans give equal bytes, so a plan's hash does not change with a
// release that only adds choices.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <set>
#include <utility>

#include "common/model/attention_workspace.h"
#include "common/model/bundles.h"
#include "common/model/compute_type.h"
#include "common/model/freeze.h"
#include "common/model/logits_chunk.h"
#include "common/model/recipes.h"
#include "common/model/tensor_cuts.h"
#include "common/model/tensor_parts.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/plan_parts_proto.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/program/program_operands.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_request.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostRanks = 65536;

template <typename To, typename From>
void Copy(const From& from, To& to) {
  to = {from.begin(), from.end()};
}
template <typename Kind>
void Copy(const std::vector<Id<Kind>>& from, google::protobuf::RepeatedField<int32_t>& to) {
  to.Clear();
  for (const Id<Kind> id : from) {
    to.Add(id.value());
  }
}

// A plan carries those operands that are not all buffers of a group; the others follow from them.
v1::PlannedInstruction InstructionToProto(const MoveTable& moves, const Instruction& at) {
  v1::PlannedInstruction proto;
  proto.set_op(static_cast<int32_t>(LabelOf(moves, at)));
  proto.set_stream(static_cast<int32_t>(at.stream));
  proto.set_unit(at.unit.value());
  proto.set_call(at.call);
  const bool computes = IsCompute(at.op);
  const bool opens = at.op == OpCode::kAllocStaging;
  proto.set_gathered(computes ? -1 : BufferOf(at, Role::kWeights).value());
  proto.set_staging(BufferOf(at, opens ? Role::kGradient : Role::kSend).value());
  proto.set_receive(BufferOf(at, Role::kReceive).value());
  proto.set_saved(BufferOf(at, Role::kSaved).value());
  proto.set_workspace(BufferOf(at, Role::kScratch).value());
  proto.set_freed(at.freed.value());
  proto.set_group(at.group.value());
  proto.set_remade(BufferOf(at, Role::kRemade).value());
  if (computes) {
    proto.set_accumulates(Accumulates(at));
    Copy(BuffersOf(at, Role::kWeights), *proto.mutable_weights());
    Copy(BuffersOf(at, Role::kGradient), *proto.mutable_gradients());
  }
  proto.set_segment(at.segment.value() + 1);
  if (computes) {
    proto.set_segment_move(static_cast<int32_t>(MoveOfInstruction(moves, at)));
  }
  Copy(at.waits, *proto.mutable_waits());
  return proto;
}

absl::StatusOr<Instruction> InstructionFromProto(const MoveTable& moves,
                                                 const v1::PlannedInstruction& proto) {
  Instruction at;
  OpLabel label = OpLabel::kEndPhase;
  RETURN_IF_ERROR(ReadEnum("instruction.op", proto.op(), kLastOpLabel, label, 1));
  RETURN_IF_ERROR(ReadEnum("instruction.stream", proto.stream(), kLastStream, at.stream, 1));
  at.unit = proto.unit();
  at.call = proto.call();
  at.freed = proto.freed();
  at.group = proto.group();
  at.op = OpOfLabel(label);
  at.move = MoveOfLabel(moves, at.group, label);
  at.segment = proto.segment() - 1;
  if (IsCompute(at.op)) {
    SegmentMove move = SegmentMove::kNone;
    RETURN_IF_ERROR(ReadEnum(
        "instruction.segment_move", proto.segment_move(), SegmentMove::kScatterRows, move, 0));
    at.move = MoveOfStep(moves, move);
  }
  Copy(proto.waits(), at.waits);
  return at;
}

bool IsCutOn(const Placements& placements, const char* axis) {
  return PlacementOn(placements, axis).in_flat_family();
}

void GroupToProto(const ShardingPlan& plan, GroupId id, v1::PlannedGroup& proto) {
  const GroupLayout& group = plan.groups[id];
  const GroupRoles& roles = plan.roles[id];
  proto.set_unit(group.unit.value());
  proto.set_width(group.layout.width);
  proto.set_shard_elements(group.layout.shard_elements);
  proto.set_padding_elements(group.layout.padding_elements);
  Copy(group.layout.offsets, *proto.mutable_item_offsets());
  Copy(group.tensors, *proto.mutable_tensors());
  Copy(group.tensor_offsets, *proto.mutable_tensor_offsets());
  v1::PlannedRules& to = *proto.mutable_rules();
  to.set_trainable(group.trainable);
  to.set_weights_sharded(IsCutOn(roles.parameter, kShardAxis));
  to.set_reduces_each_turn(roles.between != roles.staged);
  to.set_gradient_sharded(IsCutOn(roles.at_step, kShardAxis));
  to.set_optimizer_sharded(IsCutOn(roles.stored, kShardAxis));
  to.set_outer_gradient_sharded(IsCutOn(roles.at_step, kReplicateAxis));
}

// Placements of the data axes travel as what each axis cuts.
GroupRoles RolesFromProto(const v1::PlannedRules& proto, const Mesh& mesh) {
  const auto placed = [&](const Placement& inner, const Placement& outer) {
    Placements placements = {{kShardAxis, inner}};
    if (mesh.AxisIndex(kReplicateAxis) >= 0) {
      placements.push_back({kReplicateAxis, outer});
    }
    return Canonical(placements, mesh);
  };
  const auto flat = [](bool cut) { return cut ? Placement::Flat() : Placement::Replicate(); };
  const Placement outer = flat(proto.outer_gradient_sharded());
  const Placement addend = Placement::Partial();
  GroupRoles roles = {.stored = placed(flat(proto.optimizer_sharded()), outer),
                      .parameter = placed(flat(proto.weights_sharded()), Placement::Replicate()),
                      .used = {},
                      .staged = placed(addend, addend),
                      .between = {},
                      .measured = placed(Placement::Flat(), outer),
                      .at_step = placed(flat(proto.gradient_sharded()), outer)};
  roles.between = proto.reduces_each_turn() ? placed(Placement::Flat(), addend) : roles.staged;
  return roles;
}

// The tensors of a group lie apart, aligned, and inside it.
absl::Status CheckLayout(const GroupLayout& group,
                         const ModelInventory& inventory,
                         const std::string& name) {
  if (group.tensors.empty() || group.tensor_offsets.size() != group.tensors.size() ||
      group.layout.shard_elements < 1 ||
      group.layout.shard_elements > kMostPlannedBytes / group.layout.width ||
      group.layout.shard_elements % kLayoutAlignmentElements != 0) {
    return Invalid(absl::StrCat(name, ": expected tensors, an offset of each, whole shards"));
  }
  int64_t end = 0;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const TensorId tensor = group.tensors[i];
    if (!inventory.tensors.Has(tensor) || inventory.tensors[tensor].unit != group.unit ||
        inventory.tensors[tensor].trainable != group.trainable ||
        inventory.tensors[tensor].recipe != group.recipe) {
      return Invalid(absl::StrCat(name, ": does not hold the tensors of its unit"));
    }
    if (group.tensor_offsets[i] < end || group.tensor_offsets[i] % kLayoutAlignmentElements != 0) {
      return Invalid(absl::StrCat(name, ": tensors overlap or are not aligned"));
    }
    end = group.tensor_offsets[i] + ItemElements(inventory.tensors[tensor]);
  }
  return end <= group.layout.total_elements()
             ? absl::OkStatus()
             : Invalid(absl::StrCat(name, ": tensors end beyond the shards"));
}

absl::Status GroupsFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  std::set<TensorId> placed;
  bool cut_by_replicas = false;
  for (const v1::PlannedGroup& from : proto.groups()) {
    cut_by_replicas |= from.rules().outer_gradient_sharded();
  }
  const int64_t width = plan.lanes.width() * (cut_by_replicas ? plan.lanes.replicas : 1);
  for (int id = 0; id < proto.groups_size(); ++id) {
    const v1::PlannedGroup& from = proto.groups(id);
    const std::string name = absl::StrCat("groups[", id, "]");
    GroupLayout group = {.unit = from.unit(),
                         .trainable = from.rules().trainable(),
                         .layout = {.width = from.width(),
                                    .shard_elements = from.shard_elements(),
                                    .offsets = {},
                                    .padding_elements = from.padding_elements()},
                         .tensors = {},
                         .tensor_offsets = {}};
    Copy(from.item_offsets(), group.layout.offsets);
    Copy(from.tensors(), group.tensors);
    Copy(from.tensor_offsets(), group.tensor_offsets);
    if (!group.tensors.empty() && plan.inventory.tensors.Has(group.tensors.front())) {
      group.recipe = plan.inventory.tensors[group.tensors.front()].recipe;
    }
    GroupRoles roles = RolesFromProto(from.rules(), plan.mesh);
    if (group.layout.width != width ||
        !PossibleRoles(roles, plan.lanes, plan.mesh, group.trainable) ||
        (id > 0 && group.unit < plan.groups.back().unit)) {
      return Invalid(absl::StrCat(name, ": width, rules or order are those of no strategy"));
    }
    RETURN_IF_ERROR(CheckLayout(group, plan.inventory, name));
    placed.insert(group.tensors.begin(), group.tensors.end());
    plan.groups.push_back(std::move(group));
    plan.roles.push_back(std::move(roles));
  }
  size_t tensors = 0;
  for (const GroupLayout& group : plan.groups) {
    tensors += group.tensors.size();
  }
  return tensors == placed.size() && tensors == plan.inventory.tensors.size()
             ? absl::OkStatus()
             : Invalid("groups: expected every tensor of the model in one");
}

// The second state of an optimizer travels as a kind of its own and no slot, as it did when AdamW's
// were two kinds: plans keep their hashes.
constexpr int32_t kSecondState = 3;

void BufferToProto(const ProgramBuffer& buffer, v1::PlannedBuffer& proto) {
  const bool second = buffer.kind == BufferKind::kState && buffer.slot == 1;
  proto.set_name(buffer.name);
  proto.set_kind(second ? kSecondState : static_cast<int32_t>(buffer.kind));
  proto.set_memory(static_cast<int32_t>(buffer.memory));
  proto.set_unit(buffer.unit.value());
  proto.set_group(buffer.group.value());
  proto.set_call(buffer.call);
  proto.set_slot(second ? 0 : buffer.slot);
  proto.set_bytes(buffer.bytes);
  proto.set_persistent(buffer.persistent);
  proto.set_inside(buffer.inside.value());
}

absl::Status BuffersFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  for (const v1::PlannedBuffer& from : proto.buffers()) {
    ProgramBuffer buffer;
    buffer.name = from.name();
    const bool second = from.kind() == kSecondState;
    RETURN_IF_ERROR(ReadEnum("buffer.kind",
                             second ? static_cast<int32_t>(BufferKind::kState) : from.kind(),
                             kLastBufferKind,
                             buffer.kind,
                             1));
    RETURN_IF_ERROR(
        ReadEnum("buffer.memory", from.memory(), MemoryKind::kOffload, buffer.memory, 1));
    buffer.unit = from.unit();
    buffer.group = from.group();
    buffer.call = from.call();
    buffer.slot = second ? 1 : from.slot();
    buffer.bytes = from.bytes();
    buffer.persistent = from.persistent();
    buffer.inside = from.inside();
    plan.buffers.push_back(std::move(buffer));
  }
  const ProgramRequest request = {.inventory = plan.inventory,
                                  .groups = plan.groups,
                                  .mesh = plan.mesh,
                                  .roles = plan.roles,
                                  .moves = plan.moves,
                                  .lanes = plan.lanes,
                                  .options = plan.options};
  const ProgramBuffers expected = BuildBuffers(request);
  for (size_t i = 0; i < std::min(expected.size(), plan.buffers.size()); ++i) {
    plan.buffers[i].dtype = expected[i].dtype;  // follows from the options
  }
  if (plan.buffers != expected) {
    return Invalid("buffers: not those that the layouts, lanes and options need");
  }
  Copy(proto.memory().offsets(), plan.memory.offsets);
  plan.memory.private_bytes = proto.memory().private_bytes();
  plan.memory.symmetric_bytes = proto.memory().symmetric_bytes();
  plan.memory.common_bytes = proto.memory().common_bytes();
  plan.memory.offload_bytes = proto.memory().offload_bytes();
  plan.memory.lower_bound_bytes = proto.memory().lower_bound_bytes();
  const bool offsets_in_range =
      std::all_of(plan.memory.offsets.begin(), plan.memory.offsets.end(), [](int64_t offset) {
        return offset >= 0 && offset <= kMostPlannedBytes;
      });
  return offsets_in_range ? absl::OkStatus() : Invalid("memory.offsets: out of range");
}

// The tensors are those of the model; some may be frozen.
absl::Status TensorsFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  ModelInventory& inventory = plan.inventory;
  if (proto.tensors_size() != std::ssize(inventory.tensors)) {
    return Invalid("tensors: not those of the model");
  }
  std::vector<std::string> frozen;
  IdVector<TensorId, Recipe> recipes(inventory.tensors.size(), Recipe::kNone);
  for (int i = 0; i < proto.tensors_size(); ++i) {
    const TensorSpec& expected = inventory.tensors[i];
    const v1::PlannedTensor& got = proto.tensors(i);
    if (got.name() != expected.name || got.site() != expected.site ||
        Shape(got.shape().begin(), got.shape().end()) != expected.shape) {
      return Invalid(absl::StrCat("tensors: expected ",
                                  expected.name,
                                  " ",
                                  ShapeText(expected.shape),
                                  ", got ",
                                  got.name()));
    }
    if (got.frozen()) {
      frozen.push_back(got.name());
    }
    RETURN_IF_ERROR(ReadEnum("tensor.recipe", got.recipe(), Recipe::kNvFp4, recipes[i]));
  }
  RETURN_IF_ERROR(ApplyFreeze(frozen, inventory));
  return SetRecipes(recipes, plan.options.gemm_path, plan.micro_batch, inventory);
}

// Divides the ranks into groups of the tensor axis.
absl::Status AxisFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  TensorCut& axis = plan.inventory.cut;
  axis.degree = std::max<int64_t>(1, proto.tensor());
  axis.parts = axis.degree;
  axis.sequence = proto.sequence_parallel();
  axis.chunks = std::max<int64_t>(1, proto.tensor_chunks());
  if (!CheckDegrees(axis).ok() || plan.ranks % axis.degree != 0) {
    return Invalid("tensor, sequence_parallel, tensor_chunks: no axis of these ranks");
  }
  plan.lanes.ranks = plan.ranks / axis.degree;
  return absl::OkStatus();
}

// Ranks, lanes and the micro-batch.
absl::Status ShapeFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  constexpr int64_t kMostTokens = int64_t{1} << 30;
  plan.ranks = proto.ranks();
  plan.lanes = {.lanes = proto.lanes(),
                .ranks = proto.ranks(),
                .replicas = std::max<int64_t>(1, proto.replicas()),
                .blocks = proto.lanes_in_blocks(),
                .micro_batches = std::max<int64_t>(1, proto.micro_batches())};
  plan.micro_batch = {.sequences = proto.micro_batch_sequences(),
                      .sequence_tokens = proto.sequence_tokens()};
  RETURN_IF_ERROR(AxisFromProto(proto, plan));
  const LaneMap& lanes = plan.lanes;
  if (plan.ranks < 1 || plan.ranks > kMostRanks || lanes.lanes < lanes.ranks ||
      lanes.lanes > kMostRanks || (lanes.lanes & (lanes.lanes - 1)) != 0) {
    return Invalid("ranks, lanes: expected 1 <= ranks <= lanes, lanes a power of two");
  }
  if ((lanes.replicas & (lanes.replicas - 1)) != 0 || lanes.ranks % lanes.replicas != 0 ||
      lanes.replicas > 256) {
    return Invalid("replicas: expected a power of two up to 256 that divides the ranks");
  }
  if ((lanes.blocks && lanes.lanes % lanes.ranks != 0) ||
      lanes.micro_batches > (int64_t{1} << 22) / lanes.lanes) {
    return Invalid("lanes_in_blocks, micro_batches: out of range");
  }
  if (plan.micro_batch.sequences < 1 || plan.micro_batch.sequences > kMostTokens ||
      plan.micro_batch.sequence_tokens < 1 ||
      plan.micro_batch.sequence_tokens > kMostTokens / plan.micro_batch.sequences) {
    return Invalid("micro_batch_sequences, sequence_tokens: out of range");
  }
  return absl::OkStatus();
}

void ProgramsToProto(const ShardingPlan& plan, v1::ShardingPlan& proto) {
  for (const StepProgram& program : plan.programs) {
    v1::PlannedProgram& added = *proto.add_programs();
    added.set_phase(static_cast<int32_t>(program.phase));
    added.set_part(static_cast<int32_t>(program.part));
    Copy(program.live_at_start, *added.mutable_live_at_start());
    Copy(program.live_at_end, *added.mutable_live_at_end());
    for (const Instruction& at : program.instructions) {
      *added.add_instructions() = InstructionToProto(plan.moves, at);
    }
  }
}

// Operands follow from the plan; those that it carries must be the same.
absl::Status OperandsFromProto(const v1::PlannedProgram& proto,
                               const OperandContext& context,
                               StepProgram& program) {
  AddOperands(context, program);
  for (int i = 0; i < proto.instructions_size(); ++i) {
    const Instruction& at = program.instructions[i];
    v1::PlannedInstruction carried = proto.instructions(i);
    carried.DiscardUnknownFields();
    if (InstructionToProto(context.moves, at).SerializeAsString() != carried.SerializeAsString()) {
      return Invalid(
          absl::StrCat(InstructionName(program, i), ": expected the buffers of its group or unit"));
    }
  }
  return absl::OkStatus();
}

absl::Status ProgramsFromProto(const v1::ShardingPlan& proto, ShardingPlan& plan) {
  const BufferIndex index(plan.buffers);
  const ModelUses trains = UsesOf(plan.inventory, plan.groups, true);
  const ModelUses evaluates = UsesOf(plan.inventory, plan.groups, false);
  const IdVector<GroupId, bool> on_host = HostUpdatesOf(plan.buffers, plan.groups, plan.options).of;
  for (const v1::PlannedProgram& from : proto.programs()) {
    StepProgram program;
    RETURN_IF_ERROR(ReadEnum("program.phase", from.phase(), Phase::kEval, program.phase, 1));
    RETURN_IF_ERROR(ReadEnum("program.part", from.part(), LanePart::kClose, program.part, 1));
    Copy(from.live_at_start(), program.live_at_start);
    Copy(from.live_at_end(), program.live_at_end);
    for (const v1::PlannedInstruction& at : from.instructions()) {
      ASSIGN_OR_RETURN(Instruction instruction, InstructionFromProto(plan.moves, at));
      program.instructions.push_back(std::move(instruction));
    }
    const OperandContext context = {.inventory = plan.inventory,
                                    .groups = plan.groups,
                                    .moves = plan.moves,
                                    .lanes = plan.lanes,
                                    .options = plan.options,
                                    .index = index,
                                    .model = program.phase == Phase::kEval ? evaluates : trains,
                                    .on_host = on_host,
                                    .part = program.part};
    RETURN_IF_ERROR(OperandsFromProto(from, context, program));
    plan.programs.push_back(std::move(program));
  }
  return absl::OkStatus();
}

}  // namespace

v1::ShardingPlan ToProto(const ShardingPlan& plan) {
  v1::ShardingPlan proto;
  proto.set_ranks(plan.ranks);
  proto.set_lanes(plan.lanes.lanes);
  proto.set_replicas(plan.lanes.replicas);
  if (const TensorCut& axis = plan.inventory.cut; axis.degree > 1) {
    proto.set_tensor(axis.degree);
    proto.set_sequence_parallel(axis.sequence);
    proto.set_tensor_chunks(axis.chunks == 1 ? 0 : axis.chunks);
  }
  proto.set_lanes_in_blocks(plan.lanes.blocks);
  proto.set_micro_batches(plan.lanes.micro_batches);
  proto.set_micro_batch_sequences(plan.micro_batch.sequences);
  proto.set_sequence_tokens(plan.micro_batch.sequence_tokens);
  *proto.mutable_model() = ModelToProto(plan.inventory.config);
  OptionsToProto(plan.options, *proto.mutable_options());
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    v1::PlannedTensor& added = *proto.add_tensors();
    added.set_name(tensor.name);
    added.set_site(tensor.site);
    added.set_frozen(!tensor.trainable);
    added.set_recipe(static_cast<int32_t>(tensor.recipe));
    Copy(tensor.shape, *added.mutable_shape());
  }
  for (const GroupId group : plan.groups.ids()) {
    GroupToProto(plan, group, *proto.add_groups());
  }
  for (const ProgramBuffer& buffer : plan.buffers) {
    BufferToProto(buffer, *proto.add_buffers());
  }
  v1::PlannedMemory& memory = *proto.mutable_memory();
  Copy(plan.memory.offsets, *memory.mutable_offsets());
  memory.set_private_bytes(plan.memory.private_bytes);
  memory.set_symmetric_bytes(plan.memory.symmetric_bytes);
  memory.set_common_bytes(plan.memory.common_bytes);
  memory.set_offload_bytes(plan.memory.offload_bytes);
  memory.set_lower_bound_bytes(plan.memory.lower_bound_bytes);
  ProgramsToProto(plan, proto);
  return proto;
}

absl::StatusOr<ShardingPlan> FromProto(const v1::ShardingPlan& proto) {
  ShardingPlan plan;
  RETURN_IF_ERROR(ShapeFromProto(proto, plan));
  RETURN_IF_ERROR(OptionsFromProto(proto.options(), plan));
  ASSIGN_OR_RETURN(plan.mesh, MeshOf(plan.lanes, plan.inventory.cut.degree));
  ASSIGN_OR_RETURN(const ModelConfig config, ModelFromProto(proto.model()));
  RETURN_IF_ERROR(Annotate(CheckTensorParts(plan.options.tensor_parts, config, plan.micro_batch),
                           "options.tensor_parts"));
  TensorCut cut = plan.inventory.cut;
  cut.parts = plan.options.tensor_parts;
  RETURN_IF_ERROR(Annotate(CheckDegrees(cut), "options.tensor_parts"));
  plan.inventory = BuildInventory(config, plan.micro_batch, plan.options.recompute, cut);
  NarrowActivations(plan.options.weight_type, plan.inventory);
  ReserveAttentionWorkspace(plan.options.attention_workspace_bytes, plan.inventory);
  ReserveLogits(plan.options.logits_chunk_tokens, plan.micro_batch, plan.inventory);
  if (plan.options.layer_drop > 0) {
    MakeLayersOptional(plan.inventory);
  }
  RETURN_IF_ERROR(TensorsFromProto(proto, plan));
  const bool delayed = std::any_of(
      plan.inventory.tensors.begin(), plan.inventory.tensors.end(), [](const TensorSpec& tensor) {
        return tensor.recipe == Recipe::kDelayed;
      });
  if (delayed != (plan.options.amax_history > 0) ||
      IsQuantized(plan.inventory) != (plan.options.gemm_path != GemmPath::kNone) ||
      (IsQuantized(plan.inventory) && plan.options.weight_type != DType::kBF16)) {
    return Invalid("tensors.recipe: not with these options");
  }
  ReserveRecipeScratch(plan.options.gemm_path, plan.micro_batch, plan.inventory);
  ReserveTensorParts(plan.inventory);
  RETURN_IF_ERROR(
      Annotate(CheckTensorAxis(plan.inventory,
                               plan.micro_batch.sequences * plan.micro_batch.sequence_tokens,
                               UpdatesInGroups(plan.options.optimizer, plan.options.state_types)),
               "plan"));
  RETURN_IF_ERROR(GroupsFromProto(proto, plan));
  ASSIGN_OR_RETURN(plan.moves, MovesOf(plan));
  RETURN_IF_ERROR(BuffersFromProto(proto, plan));
  RETURN_IF_ERROR(ProgramsFromProto(proto, plan));
  RETURN_IF_ERROR(Annotate(CheckPlan(plan), "plan"));
  return plan;
}

std::string SerializePlan(const ShardingPlan& plan) {
  return ToProto(plan).SerializeAsString();
}

Sha256Digest PlanHash(const ShardingPlan& plan) {
  return Sha256(SerializePlan(plan));
}

absl::StatusOr<ShardingPlan> ParsePlan(std::string_view bytes) {
  v1::ShardingPlan proto;
  if (bytes.size() > std::numeric_limits<int>::max() ||
      !proto.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError("plan: not a ShardingPlan message");
  }
  return FromProto(proto);
}

}  // namespace ravel::plan
