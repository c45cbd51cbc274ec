// The pipeline from job to plan: inventory, lanes, groups and their roles, programs, buffer
// addresses, checker. Each stage is a pure function of the ones before; the plan has nothing that
// differs by rank. The checker runs on every plan, not only in tests: a planner's mistake is
// refused here instead of corrupting a training run. Errors name the field of the job file that a
// person can change.

#include "common/plan/sharding_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/model/attention_workspace.h"
#include "common/model/compute_type.h"
#include "common/model/freeze.h"
#include "common/model/gemm_paths.h"
#include "common/model/logits_chunk.h"
#include "common/model/recipes.h"
#include "common/model/tensor_cuts.h"
#include "common/model/tensor_parts.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/layout/padding_rule.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_builder.h"
#include "common/plan/program/program_request.h"
#include "common/plan/program/window_sizes.h"
#include "common/plan/report/wire_table.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostLanes = 65536;

// Fields that the recipe does not read.
absl::Status CheckForeignFields(const RecipeSpec& recipe) {
  const char* given = recipe.amax_algorithm != AmaxAlgorithm::kMax ? "precision.amaxAlgorithm"
                      : recipe.first_scale != FirstScale::kCurrent ? "precision.firstScale"
                                                                   : nullptr;
  if (given != nullptr && recipe.recipe != Recipe::kDelayed) {
    return FieldRefusal(given,
                        "nothing, or recipe fp8_tensor with scaling delayed beside it",
                        RecipeName(recipe.recipe));
  }
  if (recipe.amax_epsilon != 0 && !HasAmaxEpsilon(recipe.recipe)) {
    return FieldRefusal(
        "precision.amaxEpsilon",
        "nothing, or recipe fp8_block, or fp8_tensor with scaling current beside it",
        RecipeName(recipe.recipe));
  }
  return absl::OkStatus();
}

absl::Status CheckRecipe(const JobSpec& spec) {
  RETURN_IF_ERROR(CheckForeignFields(spec.recipe));
  if (spec.recipe.recipe == Recipe::kNone) {
    return absl::OkStatus();
  }
  if (!(spec.recipe.amax_epsilon >= 0 && spec.recipe.amax_epsilon <= kMostAmaxEpsilon)) {
    return FieldRefusal("precision.amaxEpsilon",
                        absl::StrCat("0 to ", kMostAmaxEpsilon),
                        absl::StrCat(spec.recipe.amax_epsilon));
  }
  if (spec.compute != ComputeType::kBF16) {
    return FieldRefusal("precision.compute",
                        absl::StrCat("bf16, for ", RecipeName(spec.recipe.recipe)),
                        ComputeName(spec.compute));
  }
  if (spec.recipe.history < 1 || spec.recipe.history > kMostAmaxHistory) {
    return FieldRefusal("precision.amaxHistory",
                        absl::StrCat("1 to ", kMostAmaxHistory),
                        absl::StrCat(spec.recipe.history));
  }
  if (spec.recipe.margin < 0 || spec.recipe.margin > kMostAmaxMargin) {
    return FieldRefusal("precision.amaxMargin",
                        absl::StrCat("0 to ", kMostAmaxMargin),
                        absl::StrCat(spec.recipe.margin));
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const PlanRequest& request) {
  const JobSpec& spec = request.spec;
  if (!spec.model.has_value()) {
    return FieldRefusal("model", "a resolved configuration");
  }
  if (spec.data.sequence_length < 1) {
    return FieldRefusal(
        "data.sequenceLength", "a positive number", absl::StrCat(spec.data.sequence_length));
  }
  if (spec.data.sequence_length > spec.model->max_position_embeddings) {
    return FieldRefusal("data.sequenceLength",
                        absl::StrCat("at most the model's maxPositionEmbeddings ",
                                     spec.model->max_position_embeddings),
                        absl::StrCat(spec.data.sequence_length));
  }
  if (!(spec.layer_drop >= 0 && spec.layer_drop < 1)) {
    return FieldRefusal("training.layerDrop", "from 0 to below 1", absl::StrCat(spec.layer_drop));
  }
  if (spec.optimizer.state_types != kF32States && !HasChosenType(spec.optimizer.kind)) {
    return FieldRefusal("training.optimizer.stateDtype",
                        absl::StrCat("fp32, since ",
                                     OptimizerName(spec.optimizer.kind),
                                     " keeps its states in nothing else"),
                        StateTypesText(spec.optimizer.state_types));
  }
  if (spec.compute != ComputeType::kBF16 && spec.optimizer.main_weights != MainWeightForm::kF32) {
    return absl::InvalidArgumentError(
        "training.optimizer.mainWeights: bf16_remainder needs precision.compute bf16");
  }
  RETURN_IF_ERROR(CheckRecipe(spec));
  if (spec.compute == ComputeType::kF16) {
    RETURN_IF_ERROR(CheckLossScale(spec.loss_scale));
  }
  const OffloadSpec& offload = spec.optimizer.offload;
  if (!(offload.fraction >= 0 && offload.fraction <= 1)) {
    return FieldRefusal(
        "training.optimizer.offload.fraction", "from 0 to 1", absl::StrCat(offload.fraction));
  }
  if (spec.transport == Transport::kShm && !request.shared_memory) {
    return absl::InvalidArgumentError(
        "parallelism.transport: shm needs all ranks on one host; use auto or gloo");
  }
  return absl::OkStatus();
}

// The roles that a unit's strategies give to its groups.
struct UnitRoles {
  GroupRoles trained;
  GroupRoles frozen;
};
absl::StatusOr<UnitRoles> RolesOfUnit(const ShardingPlan& plan,
                                      UnitId unit,
                                      const StrategyChoice& choice) {
  const TensorSpec& first = plan.inventory.tensors[plan.inventory.units[unit].tensors.front()];
  const PlacedTensor placed = {.name = first.name, .shape = first.shape};
  if (Trains(plan.inventory, unit)) {
    RETURN_IF_ERROR(CheckChoice(choice, placed, plan.lanes, plan.mesh));
  }
  UnitRoles roles;
  ASSIGN_OR_RETURN(roles.trained, RolesOf(choice, placed, plan.lanes, plan.mesh, true));
  ASSIGN_OR_RETURN(roles.frozen, RolesOf(choice, placed, plan.lanes, plan.mesh, false));
  return roles;
}

// Layouts, and what its strategies say to each group.
absl::Status AddGroups(const UnitChoices& choices, ShardingPlan& plan) {
  IdVector<UnitId, UnitRoles> roles(choices.size());
  int64_t width = plan.lanes.width();
  for (const UnitId unit : choices.ids()) {
    if (plan.inventory.units[unit].tensors.empty()) {
      continue;
    }
    absl::StatusOr<UnitRoles> of_unit = RolesOfUnit(plan, unit, choices[unit].strategies);
    RETURN_IF_ERROR(Annotate(of_unit.status(), choices[unit].field));
    roles[unit] = *std::move(of_unit);
    width = std::max(width, LayoutWidth(roles[unit].trained, plan.mesh));
  }
  for (const UnitId unit : choices.ids()) {
    if (plan.inventory.units[unit].tensors.empty()) {
      continue;
    }
    for (GroupLayout& group : PlanGroups(plan.inventory, unit, width)) {
      plan.roles.push_back(group.trainable ? roles[unit].trained : roles[unit].frozen);
      plan.groups.push_back(std::move(group));
    }
  }
  return absl::OkStatus();
}

// Kernels of fp32 compute write fp32 alone.
DType StagedTypeOf(const JobSpec& spec) {
  const bool rounds = spec.gradient_wire == WireType::kBF16 && spec.compute == ComputeType::kBF16;
  return rounds ? DType::kBF16 : kGradientType;
}

ProgramRequest RequestOf(const ShardingPlan& plan) {
  return {.inventory = plan.inventory,
          .groups = plan.groups,
          .mesh = plan.mesh,
          .roles = plan.roles,
          .moves = plan.moves,
          .lanes = plan.lanes,
          .options = plan.options};
}

// Adds the model and the order of its sums, without memory that depends on the devices.
absl::Status AddInventory(const JobSpec& spec,
                          const ModelConfig& config,
                          GemmPath path,
                          ShardingPlan& plan) {
  const TensorCut cut = TensorCutOf(spec);
  RETURN_IF_ERROR(CheckTensorParts(cut.parts, config, plan.micro_batch));
  plan.inventory = BuildInventory(config, plan.micro_batch, spec.recompute, cut);
  RETURN_IF_ERROR(ApplyFreeze(spec.freeze, plan.inventory));
  RETURN_IF_ERROR(ApplyRecipe(spec.recipe, path, plan.micro_batch, plan.inventory));
  RETURN_IF_ERROR(
      CheckTensorAxis(plan.inventory,
                      plan.micro_batch.sequences * plan.micro_batch.sequence_tokens,
                      UpdatesInGroups(spec.optimizer.kind, spec.optimizer.state_types)));
  ReserveRecipeScratch(path, plan.micro_batch, plan.inventory);
  if (spec.layer_drop > 0) {
    MakeLayersOptional(plan.inventory);
  }
  return absl::OkStatus();
}

}  // namespace

const StepProgram& ShardingPlan::program(Phase phase, LanePart part) const {
  for (const StepProgram& candidate : programs) {
    if (candidate.phase == phase && candidate.part == part) {
      return candidate;
    }
  }
  CHECK_MSG(false, "no program of this phase");
  return programs.front();
}

StepSlot SlotOf(const LaneMap& lanes, int64_t index) {
  CHECK(index >= 0 && index < lanes.programs());
  StepSlot slot = {.phase = Phase::kMiddle,
                   .part = LanePart::kMiddle,
                   .turn = index / lanes.micro_batches,
                   .micro_batch = index % lanes.micro_batches};
  const bool last = index == lanes.programs() - 1;
  if (index == 0) {
    slot.phase = last ? Phase::kOnly : Phase::kFirst;
  } else if (last) {
    slot.phase = Phase::kLast;
  }
  if (lanes.micro_batches == 1) {
    slot.part = LanePart::kWhole;
  } else if (slot.micro_batch == 0) {
    slot.part = LanePart::kOpen;
  } else if (slot.micro_batch == lanes.micro_batches - 1) {
    slot.part = LanePart::kClose;
  }
  return slot;
}

int64_t LaneOf(const ShardingPlan& plan, int64_t turn, int64_t rank) {
  return plan.lanes.LaneOf(turn, rank / TensorRanks(plan.inventory));
}

bool CountsLane(const ShardingPlan& plan, int64_t rank) {
  return rank % TensorRanks(plan.inventory) == 0;
}

absl::StatusOr<JobSpec> ResolveBatch(JobSpec spec) {
  if (spec.global_batch < 1) {
    return FieldRefusal(
        "training.globalBatch", "a positive number", absl::StrCat(spec.global_batch));
  }
  int64_t largest = std::max<int64_t>(1, spec.device_count);
  for (const int64_t size : spec.elastic.sizes) {
    largest = std::max(largest, size);
  }
  RETURN_IF_ERROR(CheckDegrees(TensorCutOf(spec)));
  largest = DivCeil(largest, spec.tensor);  // ranks of the data axes
  const bool chosen = spec.virtual_ranks == 0;
  if (chosen) {
    spec.virtual_ranks = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest)));
  }
  if (spec.virtual_ranks < 1 || spec.virtual_ranks > kMostLanes ||
      !std::has_single_bit(static_cast<uint64_t>(spec.virtual_ranks))) {
    return FieldRefusal("determinism.virtualRanks",
                        absl::StrCat("a power of two up to ", kMostLanes),
                        absl::StrCat(spec.virtual_ranks));
  }
  if (largest > spec.virtual_ranks) {
    return FieldRefusal("determinism.virtualRanks",
                        absl::StrCat("at least the largest device count ",
                                     spec.tensor > 1 ? "divided by parallelism.tensor " : "",
                                     largest),
                        absl::StrCat(spec.virtual_ranks));
  }
  if (spec.global_batch % spec.virtual_ranks != 0) {
    return FieldRefusal(
        "training.globalBatch",
        absl::StrCat("a multiple of ",
                     chosen ? "the lanes (the power of two at or above the largest device count) "
                            : "determinism.virtualRanks ",
                     spec.virtual_ranks),
        absl::StrCat(spec.global_batch));
  }
  const int64_t per_lane = spec.global_batch / spec.virtual_ranks;
  if (spec.micro_batch == 0) {
    spec.micro_batch = per_lane;
  }
  if (spec.micro_batch < 1 || per_lane % spec.micro_batch != 0) {
    return FieldRefusal("training.microBatch",
                        absl::StrCat("a divisor of globalBatch / virtualRanks = ", per_lane),
                        absl::StrCat(spec.micro_batch));
  }
  return spec;
}

absl::StatusOr<ShardingPlan> BuildShardingPlan(const PlanRequest& request) {
  ASSIGN_OR_RETURN(const JobSpec spec, ResolveBatch(request.spec));
  RETURN_IF_ERROR(CheckRequest({spec, request.ranks, request.shared_memory}));
  ASSIGN_OR_RETURN(const GemmPath path, ChooseGemmPath(spec.recipe, spec.cpu_devices));
  if (spec.recipe.fast_accumulation != FastAccumulation::kForward) {
    RETURN_IF_ERROR(CheckFastAccumulation(spec.recipe.fast_accumulation, path));
  }
  ShardingPlan plan;
  plan.ranks = request.ranks;
  ASSIGN_OR_RETURN(plan.lanes, LanesOf(spec, request.ranks));
  ASSIGN_OR_RETURN(plan.mesh, MeshOf(plan.lanes, spec.tensor));
  ASSIGN_OR_RETURN(const ModelConfig config, ValidateModelConfig(*spec.model));
  plan.micro_batch = {.sequences = spec.micro_batch, .sequence_tokens = spec.data.sequence_length};
  RETURN_IF_ERROR(AddInventory(spec, config, path, plan));
  NarrowActivations(WeightTypeOf(spec.compute), plan.inventory);
  if (spec.compute != ComputeType::kF32 && !spec.cpu_devices) {
    plan.options.attention_workspace_bytes = AttentionWorkspaceBytes(
        config, plan.micro_batch, spec.determinism == DeterminismMode::kExact);
    ReserveAttentionWorkspace(plan.options.attention_workspace_bytes, plan.inventory);
  }
  plan.options.logits_chunk_tokens = LogitsChunkTokens(
      spec.cpu_devices, config.vocab_size, DTypeBytes(WeightTypeOf(spec.compute)));
  ReserveLogits(plan.options.logits_chunk_tokens, plan.micro_batch, plan.inventory);
  ReserveTensorParts(plan.inventory);
  ASSIGN_OR_RETURN(const UnitChoices choices, ChoicesOf(spec, plan.inventory));
  plan.lanes.blocks = InBlocks(plan.lanes, spec.gradient_wire, plan.inventory, choices);
  RETURN_IF_ERROR(AddGroups(choices, plan));
  if (!spec.allow_padding) {
    RETURN_IF_ERROR(CheckPadding(plan.inventory, plan.groups));
  }
  const bool same_host = request.shared_memory && spec.transport != Transport::kGloo;
  plan.options = {
      .ranks = plan.ranks,
      // Ranks of one place on the tensor axis, which would share gathered weights, do not lie
      // together.
      .gather_in_place = same_host && spec.tensor == 1,
      .read_peers_in_place = same_host,
      .gather_window_bytes = spec.gather_window_bytes,
      .staging_window_bytes = spec.staging_window_bytes,
      .prefetch = true,
      .replicas = plan.lanes.replicas,
      .recompute = spec.recompute,
      .weight_type = WeightTypeOf(spec.compute),
      .main_type = MainTypeOf(spec.optimizer.main_weights),
      .optimizer = spec.optimizer.kind,
      .state_types = spec.optimizer.state_types,
      .gradient_wire = spec.gradient_wire,
      .staged_type = StagedTypeOf(spec),
      .communication_blocks = spec.communication_blocks,
      .attention_workspace_bytes = plan.options.attention_workspace_bytes,
      .logits_chunk_tokens = plan.options.logits_chunk_tokens,
      .layer_drop = spec.layer_drop,
      .amax_history = spec.recipe.recipe == Recipe::kDelayed ? spec.recipe.history : int64_t{0},
      .amax_margin = spec.recipe.recipe == Recipe::kDelayed ? spec.recipe.margin : int64_t{0},
      .offload_fraction = spec.optimizer.offload.fraction,
      .offload_copies = spec.optimizer.offload.fraction > 0 && !spec.cpu_devices,
      .gemm_path = path,
      .fast_accumulation = spec.recipe.fast_accumulation,
      .amax_algorithm = spec.recipe.amax_algorithm,
      .first_scale = spec.recipe.first_scale,
      .amax_epsilon = spec.recipe.amax_epsilon,
      .tensor_parts = plan.inventory.cut.parts};
  RETURN_IF_ERROR(PlanPrograms(plan));
  RETURN_IF_ERROR(CheckPlan(plan));
  return plan;
}

absl::StatusOr<MoveTable> MovesOf(const ShardingPlan& plan) {
  return MovesOf(MoveRequest{.inventory = plan.inventory,
                             .groups = plan.groups,
                             .roles = plan.roles,
                             .mesh = plan.mesh,
                             .options = plan.options});
}

absl::Status PlanPrograms(ShardingPlan& plan) {
  ASSIGN_OR_RETURN(plan.moves, MovesOf(plan));
  plan.options = ResolveWindows(RequestOf(plan));
  plan.buffers = BuildBuffers(RequestOf(plan));
  plan.programs = BuildPrograms(RequestOf(plan), plan.buffers);
  ASSIGN_OR_RETURN(plan.memory, PlanBuffers(plan.buffers, plan.programs));
  return absl::OkStatus();
}

}  // namespace ravel::plan
