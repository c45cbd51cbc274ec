#include "common/plan/check/program_weights.h"

#include <algorithm>
#include <vector>

#include <absl/strings/str_cat.h>

namespace ravel::plan {
namespace {

constexpr InstructionId kNone = -2;
constexpr InstructionId kBefore = -1;

// Reads a program once, in list order.
class WeightCheck {
 public:
  explicit WeightCheck(const ProgramFacts& facts)
      : facts_(facts),
        newest_(facts.plan.groups.size(), kNone),
        renewed_(facts.plan.groups.size()) {
    for (const BufferId buffer : facts.program.live_at_start) {
      newest_[facts.plan.buffers[buffer].group] = kBefore;
    }
  }

  absl::Status Run() {
    for (const InstructionId i : facts_.program.instructions.ids()) {
      const Instruction& at = facts_.At(i);
      const bool computes = IsCompute(at.op);
      const bool gathers = at.op == OpCode::kGather && facts_.MoveAt(i).of == MoveOf::kWeights;
      if (gathers) {
        RETURN_IF_ERROR(BufferOf(at, Role::kWeights) >= 0 ? Gather(i) : Renew(i));
      } else if (at.op == OpCode::kOptimizerStep || at.op == OpCode::kRefreshWeights) {
        RETURN_IF_ERROR(Write(i));
      } else if (computes) {
        RETURN_IF_ERROR(Use(i));
      }
      if (gathers || (computes && BufferOf(at, Role::kWeights) >= 0)) {
        AddReader(i);
      }
    }
    return absl::OkStatus();
  }

 private:
  const std::vector<MoveId>& MovesAt(InstructionId i) const {
    return facts_.plan.moves.of_groups[facts_.At(i).group].weights;
  }

  absl::Status Renew(InstructionId i) {
    const GroupId group = facts_.At(i).group;
    const std::vector<MoveId>& moves = MovesAt(i);
    const InstructionId before = renewed_[group];
    const auto next = before >= 0
                          ? std::find(moves.begin(), moves.end(), facts_.At(before).move) + 1
                          : moves.begin();
    if (!facts_.RenewsWeights() || next == moves.end() || *next != facts_.At(i).move) {
      return facts_.Fault("K1", i, "does not belong here");
    }
    if (before >= 0 && !facts_.Before(before, i)) {
      return facts_.Fault("K1", i, "may run before the weights are there");
    }
    renewed_[group] = i;
    return absl::OkStatus();
  }

  absl::Status Gather(InstructionId i) {
    const GroupId group = facts_.At(i).group;
    const BufferId gathered = BufferOf(facts_.At(i), Role::kWeights);
    const bool stays = facts_.plan.buffers[gathered].persistent;
    const bool renews = facts_.RenewsWeights() && newest_[group] == kNone;
    if (stays && !renews) {
      return facts_.Fault("K1", i, "gathers what is here already");
    }
    const std::vector<MoveId>& moves = MovesAt(i);
    const InstructionId renewed = renewed_[group];
    const bool cut = moves.size() > 1 && facts_.RenewsWeights();
    if (cut && (renewed < 0 || facts_.At(renewed).move != *(moves.end() - 2) ||
                !facts_.Before(renewed, i))) {
      return facts_.Fault("K1", i, "may run before the weights are renewed");
    }
    newest_[group] = i;
    return absl::OkStatus();
  }

  absl::Status Use(InstructionId i) const {
    for (const BufferId weight : BuffersOf(facts_.At(i), Role::kWeights)) {
      const ProgramBuffer& buffer = facts_.plan.buffers[weight];
      const bool gathered = !facts_.plan.moves.of_groups[buffer.group].weights.empty() &&
                            (!buffer.persistent || facts_.RenewsWeights());
      const InstructionId newest = newest_[buffer.group];
      if (gathered && (newest == kNone || !facts_.Before(newest, i))) {
        return facts_.Fault("K1", i, absl::StrCat("may run before the gather of ", buffer.name));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Write(InstructionId i) const {
    for (const InstructionId reader : read_last_) {
      if (!facts_.Before(reader, i)) {
        return facts_.Fault(
            "K1", i, absl::StrCat("may write weights that instruction ", reader.value(), " reads"));
      }
    }
    return absl::OkStatus();
  }

  // The last reader of a stream stands for those before it.
  void AddReader(InstructionId i) {
    const auto same = std::find_if(read_last_.begin(), read_last_.end(), [&](InstructionId other) {
      return facts_.At(other).stream == facts_.At(i).stream;
    });
    if (same == read_last_.end()) {
      read_last_.push_back(i);
    } else {
      *same = i;
    }
  }

  const ProgramFacts& facts_;
  IdVector<GroupId, InstructionId> newest_;   // gather of each group
  IdVector<GroupId, InstructionId> renewed_;  // the last move before it
  std::vector<InstructionId> read_last_;
};

}  // namespace

absl::Status CheckWeights(const ProgramFacts& facts) {
  return WeightCheck(facts).Run();
}

}  // namespace ravel::plan
