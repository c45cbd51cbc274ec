#include "common/plan/sharding_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/program_builder.h"
#include "common/plan/program_checker.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostLanes = 4096;

absl::Status CheckRequest(const PlanRequest& request) {
  const JobSpec& spec = request.spec;
  if (spec.strategy != Strategy::kOptimGradsParams) {
    return absl::InvalidArgumentError(
        "parallelism.strategy: only optim_grads_params (zero3) is supported yet");
  }
  if (!spec.model.has_value()) {
    return absl::InvalidArgumentError("model: expected a resolved configuration");
  }
  if (spec.data.sequence_length < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data.sequenceLength: expected a positive number, got ", spec.data.sequence_length));
  }
  if (spec.data.sequence_length > spec.model->max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.sequenceLength: expected at most the model's maxPositionEmbeddings ",
                     spec.model->max_position_embeddings,
                     ", got ",
                     spec.data.sequence_length));
  }
  if (request.ranks < 1 || request.ranks > spec.virtual_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("devices.count: expected 1 to determinism.virtualRanks ",
                     spec.virtual_ranks,
                     ", got ",
                     request.ranks));
  }
  if (spec.transport == Transport::kShm && !request.shared_memory) {
    return absl::InvalidArgumentError(
        "parallelism.transport: shm needs all ranks on one host; use auto or gloo");
  }
  return absl::OkStatus();
}

// The head's share of the memory: what is alive when most is.
absl::Status AddPeak(const ShardingPlan& plan,
                     MemoryKind memory,
                     std::map<std::string, int64_t>& bytes) {
  ASSIGN_OR_RETURN(const PeakCut peak, FindPeak(plan.buffers, plan.programs, memory));
  for (const int id : peak.buffers) {
    const ProgramBuffer& buffer = plan.buffers[static_cast<size_t>(id)];
    bytes[BufferKindName(buffer.kind)] += ArenaBytes(buffer);
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

absl::StatusOr<JobSpec> ResolveBatch(JobSpec spec) {
  if (spec.global_batch < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("training.globalBatch: expected a positive number, got ", spec.global_batch));
  }
  int64_t largest = std::max<int64_t>(1, spec.device_count);
  for (const int64_t size : spec.elastic.sizes) {
    largest = std::max(largest, size);
  }
  const bool chosen = spec.virtual_ranks == 0;
  if (chosen) {
    spec.virtual_ranks = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(largest)));
  }
  if (spec.virtual_ranks < 1 || spec.virtual_ranks > kMostLanes ||
      !std::has_single_bit(static_cast<uint64_t>(spec.virtual_ranks))) {
    return absl::InvalidArgumentError(
        absl::StrCat("determinism.virtualRanks: expected a power of two up to ",
                     kMostLanes,
                     ", got ",
                     spec.virtual_ranks));
  }
  if (largest > spec.virtual_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("determinism.virtualRanks: expected at least the largest device count ",
                     largest,
                     ", got ",
                     spec.virtual_ranks));
  }
  if (spec.global_batch % spec.virtual_ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("training.globalBatch: expected a multiple of ",
                     chosen ? "the lanes (the power of two at or above the largest device count) "
                            : "determinism.virtualRanks ",
                     spec.virtual_ranks,
                     ", got ",
                     spec.global_batch));
  }
  const int64_t per_lane = spec.global_batch / spec.virtual_ranks;
  if (spec.micro_batch == 0) {
    spec.micro_batch = per_lane;
  }
  if (spec.micro_batch != per_lane) {
    return absl::InvalidArgumentError(
        absl::StrCat("training.microBatch: expected globalBatch / virtualRanks = ",
                     per_lane,
                     " (one micro-batch per lane), got ",
                     spec.micro_batch));
  }
  return spec;
}

absl::StatusOr<ShardingPlan> BuildShardingPlan(const PlanRequest& request) {
  ASSIGN_OR_RETURN(const JobSpec spec, ResolveBatch(request.spec));
  RETURN_IF_ERROR(CheckRequest({spec, request.ranks, request.shared_memory}));
  ASSIGN_OR_RETURN(const ModelConfig config, ValidateModelConfig(*spec.model));
  ShardingPlan plan;
  plan.ranks = request.ranks;
  plan.lanes = {.lanes = spec.virtual_ranks, .ranks = request.ranks};
  plan.micro_batch = {.sequences = spec.micro_batch, .sequence_tokens = spec.data.sequence_length};
  plan.inventory = BuildInventory(config, plan.micro_batch);
  for (size_t unit = 0; unit < plan.inventory.units.size(); ++unit) {
    plan.groups.push_back(PlanGroupLayout(plan.inventory, static_cast<int>(unit), plan.ranks));
  }
  const bool same_host = request.shared_memory && spec.transport != Transport::kGloo;
  plan.options = {.ranks = plan.ranks,
                  .gather_in_place = same_host,
                  .read_peers_in_place = same_host,
                  .gather_window_bytes = spec.gather_window_bytes,
                  .staging_window_bytes = spec.staging_window_bytes,
                  .prefetch = true};
  ProgramRequest programs = {.inventory = plan.inventory,
                             .groups = plan.groups,
                             .lanes = plan.lanes,
                             .options = plan.options};
  plan.options = ResolveWindows(programs);
  programs.options = plan.options;
  plan.buffers = BuildBuffers(programs);
  plan.programs = BuildPrograms(programs, plan.buffers);
  ASSIGN_OR_RETURN(plan.memory, PlanBuffers(plan.buffers, plan.programs));
  RETURN_IF_ERROR(CheckPlan(plan));
  return plan;
}

std::vector<MemoryLine> MemoryTable(const ShardingPlan& plan) {
  std::map<std::string, int64_t> bytes;
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.persistent && buffer.inside < 0) {
      const bool weights = buffer.kind == BufferKind::kGathered;
      const int64_t share = buffer.memory == MemoryKind::kCommon
                                ? DivCeil(ArenaBytes(buffer), plan.ranks)
                                : ArenaBytes(buffer);
      bytes[weights ? BufferKindName(BufferKind::kMainWeight) : BufferKindName(buffer.kind)] +=
          share;
    }
  }
  int64_t explained = 0;
  for (const MemoryKind memory :
       {MemoryKind::kPrivate, MemoryKind::kSymmetric, MemoryKind::kCommon}) {
    CHECK(AddPeak(plan, memory, bytes).ok());
  }
  for (const auto& [category, size] : bytes) {
    explained += size;
  }
  const int64_t total = plan.memory.private_bytes + plan.memory.symmetric_bytes +
                        DivCeil(plan.memory.common_bytes, plan.ranks);
  if (total > explained) {
    bytes["alignment"] = total - explained;
  }
  std::vector<MemoryLine> table;
  for (const auto& [category, size] : bytes) {
    table.push_back({.category = category, .bytes = size});
  }
  std::stable_sort(table.begin(), table.end(), [](const MemoryLine& a, const MemoryLine& b) {
    return a.bytes > b.bytes;
  });
  return table;
}

int64_t WireBytesPerStep(const ShardingPlan& plan) {
  int64_t bytes = 0;
  for (int64_t turn = 0; turn < plan.lanes.turns(); ++turn) {
    Phase phase = turn == 0 ? Phase::kFirst : Phase::kMiddle;
    if (turn == plan.lanes.turns() - 1) {
      phase = turn == 0 ? Phase::kOnly : Phase::kLast;
    }
    // Pieces come from the ranks that have a lane in this turn; counted for a rank that has one.
    const int64_t senders = plan.lanes.LaneCount(turn) - 1;
    for (const Instruction& instruction : plan.program(phase).instructions) {
      if (instruction.op != OpCode::kGather && instruction.op != OpCode::kReduceScatter) {
        continue;
      }
      const GroupLayout& group = plan.groups[static_cast<size_t>(instruction.unit)];
      const int64_t shard_bytes = group.layout.shard_elements * 4;
      if (instruction.op == OpCode::kReduceScatter) {
        bytes += senders * shard_bytes;
      } else if (!plan.options.gather_in_place) {
        bytes += (plan.ranks - 1) * shard_bytes;
      }
    }
  }
  return bytes;
}

}  // namespace ravel::plan
