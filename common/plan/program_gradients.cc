// K7 and K9: each gradient is staged, summed and used exactly once, in the right order.

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include <absl/strings/str_cat.h>

#include "common/plan/program_facts.h"

namespace ravel::plan {
namespace {

class GradientCheck {
 public:
  explicit GradientCheck(const ProgramFacts& facts) : facts_(facts) {}

  absl::Status Run() {
    RETURN_IF_ERROR(Index());
    RETURN_IF_ERROR(CheckStaging());
    RETURN_IF_ERROR(CheckOrder());
    for (const GradientCall& call : facts_.model.gradients) {
      RETURN_IF_ERROR(CheckSum(call));
    }
    for (size_t group = 0; group < facts_.plan.groups.size(); ++group) {
      RETURN_IF_ERROR(CheckFinish(static_cast<int>(group)));
    }
    RETURN_IF_ERROR(CheckUpdate());
    return expected_.size() == at_.size()
               ? absl::OkStatus()
               : facts_.Fault("K7", facts_.count() - 1, "ends a program with a step too many");
  }

 private:
  using Key = std::tuple<OpCode, int, int>;  // (op, group, call)

  // Where each step of a gradient and each step of the update is; none may be there twice.
  absl::Status Index() {
    for (int i = 0; i < facts_.count(); ++i) {
      const Instruction& at = facts_.At(i);
      switch (at.op) {
        case OpCode::kAllocStaging:
        case OpCode::kReduceScatter:
        case OpCode::kAccumulateGrad:
        case OpCode::kOuterReduce:
        case OpCode::kJoinGradients:
        case OpCode::kGatherGradient:
        case OpCode::kStatsReduce:
        case OpCode::kDecideStep:
        case OpCode::kOptimizerStep:
          if (!at_.emplace(Key{at.op, at.group, at.call}, i).second) {
            return facts_.Fault("K7", i, "is there twice");
          }
          break;
        default:
          break;
      }
    }
    return absl::OkStatus();
  }

  int Find(OpCode op, int group = -1, int call = 0) const {
    const auto found = at_.find({op, group, call});
    return found == at_.end() ? -1 : found->second;
  }
  // The instruction must be there, after another one (-1: nothing).
  absl::Status Expect(OpCode op, int group, int call, int after) {
    const int at = Find(op, group, call);
    if (at < 0) {
      return facts_.Fault(
          "K7", facts_.count() - 1, absl::StrCat("ends without ", OpName(op), " of group ", group));
    }
    expected_.insert({op, group, call});
    if (after >= 0 && !facts_.Before(after, at)) {
      return facts_.Fault("K7", at, absl::StrCat("may run before instruction ", after));
    }
    return absl::OkStatus();
  }

  const GroupRules& RulesOf(int group) const {
    return facts_.plan.rules[static_cast<size_t>(group)];
  }

  // K9: memory of a gradient is opened before its first writer, and left after its last.
  absl::Status CheckStaging() {
    for (const GradientCall& call : facts_.model.gradients) {
      if (facts_.Opens()) {
        RETURN_IF_ERROR(Expect(OpCode::kAllocStaging, call.group, call.call, -1));
        const int alloc = Find(OpCode::kAllocStaging, call.group, call.call);
        if (!facts_.Before(alloc, facts_.use_at[call.first_use])) {
          return facts_.Fault("K9", alloc, "may run after the gradient is written");
        }
      }
    }
    for (const Lifetime& life : facts_.lifetimes) {
      if (facts_.plan.buffers[static_cast<size_t>(life.buffer)].kind == BufferKind::kStaging) {
        const OpCode last = facts_.At(life.accesses.back()).op;
        if (last != OpCode::kReduceScatter && last != OpCode::kAccumulateGrad) {
          return facts_.Fault(
              "K9", life.begin, absl::StrCat(facts_.BufferName(life.buffer), " is never read"));
        }
      }
    }
    return absl::OkStatus();
  }

  OpCode LeavesBy(int group) const {
    return RulesOf(group).reduces_each_turn ? OpCode::kReduceScatter : OpCode::kAccumulateGrad;
  }

  // Gradients leave in the order of backward: first those whose last writer is first.
  absl::Status CheckOrder() const {
    int before = -1;
    if (!facts_.Closes()) {
      return absl::OkStatus();
    }
    for (size_t use = 0; use < facts_.model.uses.size(); ++use) {
      for (const int id : facts_.model.uses[use].gradients) {
        const GradientCall& call = facts_.model.gradients[static_cast<size_t>(id)];
        if (call.last_use != use) {
          continue;
        }
        const int leaves = Find(LeavesBy(call.group), call.group, call.call);
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
    int after = facts_.use_at[call.last_use];
    RETURN_IF_ERROR(Expect(LeavesBy(call.group), call.group, call.call, after));
    after = Find(LeavesBy(call.group), call.group, call.call);
    if (!facts_.Updates()) {
      return absl::OkStatus();
    }
    if (!RulesOf(call.group).reduces_each_turn) {
      RETURN_IF_ERROR(Expect(OpCode::kReduceScatter, call.group, call.call, after));
      after = Find(OpCode::kReduceScatter, call.group, call.call);
    }
    if (facts_.plan.lanes.replicas > 1) {
      RETURN_IF_ERROR(Expect(OpCode::kOuterReduce, call.group, call.call, after));
      after = Find(OpCode::kOuterReduce, call.group, call.call);
    }
    sums_[call.group].push_back(after);
    return absl::OkStatus();
  }

  // The sums of a group's calls become one, and reach whoever updates.
  absl::Status CheckFinish(int group) {
    const auto sums = sums_.find(group);
    if (sums == sums_.end()) {
      return absl::OkStatus();
    }
    if (sums->second.size() > 1) {
      for (const int sum : sums->second) {
        RETURN_IF_ERROR(Expect(OpCode::kJoinGradients, group, 0, sum));
      }
      sums->second = {Find(OpCode::kJoinGradients, group)};
    }
    if (!RulesOf(group).gradient_sharded) {
      RETURN_IF_ERROR(Expect(OpCode::kGatherGradient, group, 0, sums->second.front()));
    }
    return absl::OkStatus();
  }

  // Statistics of everything, one decision, one update of each trained group.
  absl::Status CheckUpdate() {
    if (!facts_.Updates()) {
      return absl::OkStatus();
    }
    for (const auto& [group, sums] : sums_) {
      RETURN_IF_ERROR(Expect(OpCode::kStatsReduce, -1, 0, sums.front()));
    }
    const int stats = Find(OpCode::kStatsReduce);
    for (const int use : facts_.use_at) {
      if (!facts_.Before(use, stats)) {
        return facts_.Fault("K7", stats, absl::StrCat("may run before instruction ", use));
      }
    }
    RETURN_IF_ERROR(Expect(OpCode::kDecideStep, -1, 0, stats));
    const int decide = Find(OpCode::kDecideStep);
    for (size_t group = 0; group < facts_.plan.groups.size(); ++group) {
      const int id = static_cast<int>(group);
      if (!RulesOf(id).trainable) {
        continue;
      }
      RETURN_IF_ERROR(Expect(OpCode::kOptimizerStep, id, 0, decide));
      const int whole = Find(OpCode::kGatherGradient, id);
      const int step = Find(OpCode::kOptimizerStep, id);
      if (whole >= 0 && !facts_.Before(whole, step)) {
        return facts_.Fault("K7", step, absl::StrCat("may run before instruction ", whole));
      }
    }
    return absl::OkStatus();
  }

  const ProgramFacts& facts_;
  std::map<Key, int> at_;                 // the steps that the program has
  std::set<Key> expected_;                // those that it should have
  std::map<int, std::vector<int>> sums_;  // per group, of each call: the last instruction
};

}  // namespace

absl::Status CheckGradients(const ProgramFacts& facts) {
  return GradientCheck(facts).Run();
}

}  // namespace ravel::plan
