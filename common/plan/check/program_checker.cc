// The rules K1 to K14 in order, over all programs of a plan. Each rule reads operands, waits and
// lifetimes alone; none asks the builder how it came to them, so that a fault of the builder shows.

#include "common/plan/check/program_checker.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/plan/check/plan_places.h"
#include "common/plan/check/program_facts.h"
#include "common/plan/check/program_form.h"
#include "common/plan/check/program_gradients.h"
#include "common/plan/check/program_memory.h"
#include "common/plan/check/program_weights.h"
#include "common/plan/check/program_windows.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_uses.h"

namespace ravel::plan {
namespace {

// K8: EndPhase is after everything.
absl::Status CheckEnd(const ProgramFacts& facts) {
  const InstructionId end = facts.last();
  for (InstructionId i = 0; i < end; ++i) {
    if (facts.At(i).op != OpCode::kFree && !facts.Before(i, end)) {
      return facts.Fault("K8", i, "may still run when the program ends");
    }
  }
  return absl::OkStatus();
}

// K8 between programs: a free closes what this program opened, or staging that lives over the
// micro-batches of a lane, which the first opens and the last leaves.
absl::Status CheckStagingFrees(const ProgramFacts& facts) {
  IdVector<BufferId, InstructionId> freed(facts.plan.buffers.size());
  for (const InstructionId i : facts.program.instructions.ids()) {
    const Instruction& at = facts.At(i);
    if (at.op == OpCode::kFree && facts.plan.buffers[at.freed].persistent) {
      const BufferKind kind = facts.plan.buffers[at.freed].kind;
      if (kind != BufferKind::kStaging || !facts.Closes() || freed[at.freed] >= 0) {
        return facts.Fault("K8", i, absl::StrCat("frees ", facts.BufferName(at.freed)));
      }
      freed[at.freed] = i;
    }
  }
  if (!facts.Closes() || facts.program.part == LanePart::kWhole) {
    return absl::OkStatus();
  }
  for (const InstructionId i : facts.program.instructions.ids()) {
    const Instruction& at = facts.At(i);
    const BufferId sent = BufferOf(at, Role::kSend);
    const bool staged = sent >= 0 && facts.plan.buffers[sent].kind == BufferKind::kStaging;
    if (staged && freed[sent] < i) {
      return facts.Fault("K8", i, "leaves staging open between programs");
    }
  }
  return absl::OkStatus();
}

// What one program leaves alive is what the next one starts with, and a step or an evaluation ends
// with nothing.
absl::Status CheckHandOver(const ShardingPlan& plan) {
  const auto fault = [](const StepProgram& program) {
    return absl::FailedPreconditionError(
        absl::StrCat("K8: ",
                     InstructionName(program, program.instructions.last_id()),
                     ": does not hand over what the next program starts with"));
  };
  const StepProgram* before = nullptr;
  for (int64_t at = 0; at < plan.lanes.programs(); ++at) {
    const StepSlot slot = SlotOf(plan.lanes, at);
    const StepProgram& program = plan.program(slot.phase, slot.part);
    if (program.live_at_start !=
        (before == nullptr ? std::vector<BufferId>() : before->live_at_end)) {
      return fault(before == nullptr ? program : *before);
    }
    before = &program;
  }
  const StepProgram& eval = plan.program(Phase::kEval);
  if (!before->live_at_end.empty() || !eval.live_at_start.empty() || !eval.live_at_end.empty()) {
    return fault(before->live_at_end.empty() ? eval : *before);
  }
  return absl::OkStatus();
}

// K8: the programs are those that a step runs, and an evaluation.
absl::Status CheckKinds(const ShardingPlan& plan) {
  std::vector<std::pair<Phase, LanePart>> expected;
  for (int64_t at = 0; at < plan.lanes.programs(); ++at) {
    const StepSlot slot = SlotOf(plan.lanes, at);
    const std::pair<Phase, LanePart> kind = {slot.phase, slot.part};
    if (std::find(expected.begin(), expected.end(), kind) == expected.end()) {
      expected.push_back(kind);
    }
  }
  expected.emplace_back(Phase::kEval, LanePart::kWhole);
  const bool equal = std::equal(plan.programs.begin(),
                                plan.programs.end(),
                                expected.begin(),
                                expected.end(),
                                [](const StepProgram& program, const auto& kind) {
                                  return program.phase == kind.first && program.part == kind.second;
                                });
  return equal
             ? CheckHandOver(plan)
             : absl::FailedPreconditionError("K8: the programs do not fit turns and micro-batches");
}

// Moves are those that the roles need, in this order; no instruction has another.
absl::Status CheckMoves(const ShardingPlan& plan) {
  ASSIGN_OR_RETURN(const MoveTable needed, MovesOf(plan));
  const bool equal = needed.moves == plan.moves.moves && needed.of_groups == plan.moves.of_groups &&
                     needed.statistics == plan.moves.statistics &&
                     needed.activation_sum == plan.moves.activation_sum &&
                     needed.activation_scatter == plan.moves.activation_scatter &&
                     needed.activation_gather == plan.moves.activation_gather;
  return equal ? absl::OkStatus()
               : absl::FailedPreconditionError("K13: the moves are not those of the placements");
}

absl::Status CheckShape(const ShardingPlan& plan) {
  const bool fits = plan.roles.size() == plan.groups.size() &&
                    plan.moves.of_groups.size() == plan.groups.size() &&
                    plan.memory.offsets.size() == plan.buffers.size() &&
                    plan.lanes.ranks * TensorRanks(plan.inventory) == plan.ranks &&
                    plan.lanes.ranks % plan.lanes.replicas == 0 &&
                    plan.mesh.rank_count() == plan.ranks;
  if (!fits) {
    return absl::FailedPreconditionError("K13: roles, offsets, mesh or lanes do not fit the plan");
  }
  // Groups are mostly alike.
  std::vector<std::pair<GroupRoles, bool>> known;
  for (const GroupId group : plan.groups.ids()) {
    std::pair<GroupRoles, bool> roles = {plan.roles[group], plan.groups[group].trainable};
    if (std::find(known.begin(), known.end(), roles) != known.end()) {
      continue;
    }
    if (!PossibleRoles(roles.first, plan.lanes, plan.mesh, roles.second)) {
      return absl::FailedPreconditionError(
          absl::StrCat("K13: group ", group.value(), ": its placements are those of no strategy"));
    }
    known.push_back(std::move(roles));
  }
  return CheckMoves(plan);
}

}  // namespace

// Facts that all programs of a plan have in common.
struct ProgramChecker::PlanFacts {
  explicit PlanFacts(const ShardingPlan& of)
      : plan(of),
        index(of.buffers),
        trains(UsesOf(of.inventory, of.groups, true)),
        evaluates(UsesOf(of.inventory, of.groups, false)),
        on_host(HostUpdatesOf(of.buffers, of.groups, of.options).of) {}

  const ShardingPlan& plan;
  const BufferIndex index;
  const ModelUses trains;
  const ModelUses evaluates;
  const IdVector<GroupId, bool> on_host;
};

ProgramChecker::ProgramChecker(const ShardingPlan& plan)
    : facts_(std::make_unique<PlanFacts>(plan)) {}
ProgramChecker::ProgramChecker(ProgramChecker&& other) noexcept = default;
ProgramChecker& ProgramChecker::operator=(ProgramChecker&& other) noexcept = default;
ProgramChecker::~ProgramChecker() = default;

absl::StatusOr<ProgramChecker> ProgramChecker::Create(const ShardingPlan& plan) {
  RETURN_IF_ERROR(CheckShape(plan));
  return ProgramChecker(plan);
}

absl::Status ProgramChecker::Check(const StepProgram& program) const {
  const ShardingPlan& plan = facts_->plan;
  const ModelUses& model = program.phase == Phase::kEval ? facts_->evaluates : facts_->trains;
  std::vector<InstructionId> use_at;
  std::vector<InstructionId> use_begins;
  const OperandContext context = {.inventory = plan.inventory,
                                  .groups = plan.groups,
                                  .moves = plan.moves,
                                  .lanes = plan.lanes,
                                  .options = plan.options,
                                  .index = facts_->index,
                                  .model = model,
                                  .on_host = facts_->on_host,
                                  .part = program.part};
  RETURN_IF_ERROR(CheckForm(plan, context, facts_->on_host, program, use_at, use_begins));
  ASSIGN_OR_RETURN(std::vector<Lifetime> lifetimes, LifetimesOf(program, plan.buffers));
  const ProgramFacts facts = {.plan = plan,
                              .program = program,
                              .index = facts_->index,
                              .model = model,
                              .order = HappensBefore(program),
                              .lifetimes = std::move(lifetimes),
                              .use_at = std::move(use_at),
                              .use_begins = std::move(use_begins)};
  RETURN_IF_ERROR(CheckWeights(facts));
  RETURN_IF_ERROR(CheckGradients(facts));
  RETURN_IF_ERROR(CheckMemory(facts));
  RETURN_IF_ERROR(CheckEnd(facts));
  RETURN_IF_ERROR(CheckStagingFrees(facts));
  return CheckWindows(facts);
}

absl::Status CheckProgram(const ShardingPlan& plan, const StepProgram& program) {
  ASSIGN_OR_RETURN(const ProgramChecker checker, ProgramChecker::Create(plan));
  return checker.Check(program);
}

absl::Status CheckPlan(const ShardingPlan& plan) {
  RETURN_IF_ERROR(CheckShape(plan));
  RETURN_IF_ERROR(CheckPlaces(plan));
  const ProgramChecker checker(plan);
  for (const StepProgram& program : plan.programs) {
    RETURN_IF_ERROR(checker.Check(program));
  }
  return CheckKinds(plan);
}

}  // namespace ravel::plan
