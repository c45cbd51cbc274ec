// K7 and K9: each gradient is staged, summed and used exactly once, in the right order.

#include "common/plan/check/program_gradients.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include <absl/strings/str_cat.h>

#include "common/plan/program/program_offload.h"

namespace ravel::plan {
namespace {

class GradientCheck {
 public:
  explicit GradientCheck(const ProgramFacts& facts)
      : facts_(facts),
        on_host_(HostUpdatesOf(facts.plan.buffers, facts.plan.groups, facts.plan.options).of) {}

  absl::Status Run() {
    RETURN_IF_ERROR(Index());
    RETURN_IF_ERROR(CheckStaging());
    RETURN_IF_ERROR(CheckRoundedStaging());
    RETURN_IF_ERROR(CheckOrder());
    for (const GradientCall& call : facts_.model.gradients) {
      RETURN_IF_ERROR(CheckSum(call));
    }
    for (const GroupId group : facts_.plan.groups.ids()) {
      RETURN_IF_ERROR(CheckFinish(group));
    }
    RETURN_IF_ERROR(CheckUpdate());
    return expected_.size() == at_.size()
               ? absl::OkStatus()
               : facts_.Fault("K7", facts_.last(), "ends a program with a step too many");
  }

 private:
  // One thing done to a gradient or in the update: an op, and the move of a collective.
  struct Step {
    OpCode op = OpCode::kReduce;
    MoveId move = {};
    auto operator<=>(const Step&) const = default;
  };
  using Key = std::tuple<Step, GroupId, int>;  // (step, group, call)

  // Where each step of a gradient and each step of the update is; none may be there twice.
  absl::Status Index() {
    for (const InstructionId i : facts_.program.instructions.ids()) {
      const Instruction& at = facts_.At(i);
      switch (at.op) {
        case OpCode::kGather:
          if (facts_.MoveAt(i).of == MoveOf::kWeights) {
            break;
          }
          [[fallthrough]];
        case OpCode::kAllocStaging:
        case OpCode::kReduce:
        case OpCode::kAccumulateGrad:
        case OpCode::kJoinGradients:
        case OpCode::kStatsReduce:
        case OpCode::kDecideStep:
        case OpCode::kOptimizerStep:
        case OpCode::kAmaxReduce:
        case OpCode::kRefreshWeights:
        case OpCode::kOffloadGradient:
          if (!at_.emplace(Key{{at.op, at.move}, at.group, at.call}, i).second) {
            return facts_.Fault("K7", i, "is there twice");
          }
          break;
        default:
          break;
      }
    }
    return absl::OkStatus();
  }

  InstructionId Find(Step step, GroupId group = {}, int call = 0) const {
    const auto found = at_.find({step, group, call});
    return found == at_.end() ? InstructionId() : found->second;
  }
  // The instruction must be there, after another one, if any.
  absl::Status Expect(Step step, GroupId group, int call, InstructionId after) {
    const InstructionId at = Find(step, group, call);
    if (at < 0) {
      const OpLabel label = LabelOf(facts_.plan.moves, {.op = step.op, .move = step.move});
      return facts_.Fault(
          "K7",
          facts_.last(),
          absl::StrCat("ends without ", OpName(label), " of group ", group.value()));
    }
    expected_.insert({step, group, call});
    if (after >= 0 && !facts_.Before(after, at)) {
      return facts_.Fault("K7", at, absl::StrCat("may run before instruction ", after.value()));
    }
    return absl::OkStatus();
  }

  const GroupMoves& MovesOf(GroupId group) const { return facts_.plan.moves.of_groups[group]; }

  // K9: memory of a gradient is opened before its first writer, and left after its last.
  absl::Status CheckStaging() {
    for (const GradientCall& call : facts_.model.gradients) {
      if (facts_.Opens()) {
        RETURN_IF_ERROR(Expect({OpCode::kAllocStaging}, call.group, call.call, {}));
        const InstructionId alloc = Find({OpCode::kAllocStaging}, call.group, call.call);
        if (!facts_.Before(alloc, facts_.use_begins[call.first_use])) {
          return facts_.Fault("K9", alloc, "may run after the gradient is written");
        }
      }
    }
    for (const Lifetime& life : facts_.lifetimes) {
      if (facts_.plan.buffers[life.buffer].kind == BufferKind::kStaging) {
        const OpCode last = facts_.At(life.accesses.back()).op;
        if (last != OpCode::kReduce && last != OpCode::kAccumulateGrad) {
          return facts_.Fault(
              "K9", life.begin, absl::StrCat(facts_.BufferName(life.buffer), " is never read"));
        }
      }
    }
    return absl::OkStatus();
  }

  // K9: what is staged in fewer bits than sums have is written once, and leaves by a move of its
  // type: nothing adds to it, in this program or a later one, and nothing reads it as fp32.
  absl::Status CheckRoundedStaging() const {
    IdVector<BufferId, InstructionId> written(facts_.plan.buffers.size());
    for (const InstructionId i : facts_.program.instructions.ids()) {
      const Instruction& at = facts_.At(i);
      for (const Operand& operand : at.operands) {
        const ProgramBuffer& buffer = facts_.plan.buffers[operand.buffer];
        if (buffer.kind != BufferKind::kStaging || buffer.dtype == kGradientType ||
            at.op == OpCode::kAllocStaging) {
          continue;
        }
        if (operand.role == Role::kGradient) {
          // Steps of one pass write an element once together.
          InstructionId& before = written[operand.buffer];
          const bool same_pass = before >= 0 && at.segment > 0 &&
                                 facts_.At(before).unit == at.unit &&
                                 facts_.At(before).call == at.call;
          if ((operand.access != Access::kWrite || before >= 0 || buffer.persistent) &&
              !same_pass) {
            return facts_.Fault(
                "K9", i, absl::StrCat("adds to ", buffer.name, ", which is rounded"));
          }
          before = i;
        } else if (operand.access != Access::kRead || at.op != OpCode::kReduce ||
                   facts_.MoveAt(i).type != buffer.dtype) {
          return facts_.Fault("K9", i, absl::StrCat("reads ", buffer.name, " as another type"));
        }
      }
    }
    return absl::OkStatus();
  }

  // The first step of a gradient that leaves its staging.
  Step LeavesBy(GroupId group) const {
    const std::vector<MoveId>& moves = MovesOf(group).each_turn;
    return moves.empty() ? Step{OpCode::kAccumulateGrad} : Step{OpCode::kReduce, moves.front()};
  }

  // Gradients leave in the order of backward: first those whose last writer is first.
  absl::Status CheckOrder() const {
    InstructionId before;
    if (!facts_.Closes()) {
      return absl::OkStatus();
    }
    for (size_t use = 0; use < facts_.model.uses.size(); ++use) {
      for (const GradientId id : facts_.model.uses[use].gradients) {
        const GradientCall& call = facts_.model.gradients[id];
        if (call.last_use != use) {
          continue;
        }
        const InstructionId leaves = Find(LeavesBy(call.group), call.group, call.call);
        if (leaves >= 0 && leaves < before) {
          return facts_.Fault("K7", leaves, "is not the next gradient in backward order");
        }
        before = std::max(before, leaves);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckSum(const GradientCall& call) {
    if (!facts_.Closes()) {
      return absl::OkStatus();
    }
    InstructionId after = facts_.use_at[call.last_use];
    const GroupMoves& moves = MovesOf(call.group);
    std::vector<Step> steps;
    for (const MoveId move : moves.each_lane) {
      steps.push_back({OpCode::kReduce, move});
    }
    steps.push_back(LeavesBy(call.group));
    for (size_t i = 1; i < moves.each_turn.size(); ++i) {
      steps.push_back({OpCode::kReduce, moves.each_turn[i]});
    }
    for (size_t i = 0; facts_.Updates() && i < moves.each_step.size(); ++i) {
      steps.push_back({OpCode::kReduce, moves.each_step[i]});
    }
    for (const Step& step : steps) {
      RETURN_IF_ERROR(Expect(step, call.group, call.call, after));
      after = Find(step, call.group, call.call);
    }
    if (facts_.Updates()) {
      sums_[call.group].push_back(after);
    }
    return absl::OkStatus();
  }

  // The sums of a group's calls become one, and reach whoever updates.
  absl::Status CheckFinish(GroupId group) {
    const auto sums = sums_.find(group);
    if (sums == sums_.end()) {
      return absl::OkStatus();
    }
    if (sums->second.size() > 1) {
      for (const InstructionId sum : sums->second) {
        RETURN_IF_ERROR(Expect({OpCode::kJoinGradients}, group, 0, sum));
      }
      sums->second = {Find({OpCode::kJoinGradients}, group)};
    }
    InstructionId after = sums->second.front();
    for (const MoveId move : MovesOf(group).whole) {
      RETURN_IF_ERROR(Expect({OpCode::kGather, move}, group, 0, after));
      after = Find({OpCode::kGather, move}, group);
    }
    if (facts_.Updates() && on_host_[group]) {
      RETURN_IF_ERROR(Expect({OpCode::kOffloadGradient}, group, 0, after));
    }
    return absl::OkStatus();
  }

  // Statistics of everything, one decision, one update of each trained group.
  absl::Status CheckUpdate() {
    if (!facts_.Updates()) {
      return absl::OkStatus();
    }
    const Step statistics = {OpCode::kStatsReduce, facts_.plan.moves.statistics};
    for (const auto& [group, sums] : sums_) {
      RETURN_IF_ERROR(Expect(statistics, {}, 0, sums.front()));
    }
    const InstructionId stats = Find(statistics);
    for (const InstructionId use : facts_.use_at) {
      if (!facts_.Before(use, stats)) {
        return facts_.Fault("K7", stats, absl::StrCat("may run before instruction ", use.value()));
      }
    }
    RETURN_IF_ERROR(Expect({OpCode::kDecideStep}, {}, 0, stats));
    const InstructionId decide = Find({OpCode::kDecideStep});
    for (const GroupId id : facts_.plan.groups.ids()) {
      if (!facts_.plan.groups[id].trainable) {
        continue;
      }
      RETURN_IF_ERROR(Expect({OpCode::kOptimizerStep}, id, 0, decide));
      const std::vector<MoveId>& moves = MovesOf(id).whole;
      const InstructionId whole =
          moves.empty() ? InstructionId() : Find({OpCode::kGather, moves.back()}, id);
      const InstructionId step = Find({OpCode::kOptimizerStep}, id);
      if (whole >= 0 && !facts_.Before(whole, step)) {
        return facts_.Fault("K7", step, absl::StrCat("may run before instruction ", whole.value()));
      }
      if (on_host_[id]) {
        RETURN_IF_ERROR(
            Expect({OpCode::kOptimizerStep}, id, 0, Find({OpCode::kOffloadGradient}, id)));
      }
    }
    return CheckRefresh();
  }

  // Amaxes of all ranks after every update of a quantized group, then its codes.
  absl::Status CheckRefresh() {
    const Step reduce = {OpCode::kAmaxReduce, facts_.plan.moves.amax};
    for (const GroupId id : facts_.plan.groups.ids()) {
      if (facts_.plan.groups[id].recipe == Recipe::kNone) {
        continue;
      }
      RETURN_IF_ERROR(Expect(reduce, {}, 0, Find({OpCode::kOptimizerStep}, id)));
      RETURN_IF_ERROR(Expect({OpCode::kRefreshWeights}, id, 0, Find(reduce)));
    }
    return absl::OkStatus();
  }

  const ProgramFacts& facts_;
  const IdVector<GroupId, bool> on_host_;
  std::map<Key, InstructionId> at_;                     // the steps that the program has
  std::set<Key> expected_;                              // those that it should have
  std::map<GroupId, std::vector<InstructionId>> sums_;  // of each call the last instruction
};

}  // namespace

absl::Status CheckGradients(const ProgramFacts& facts) {
  return GradientCheck(facts).Run();
}

}  // namespace ravel::plan
