#include "tests/common/plan/layout/rank_check.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/plan/program/program_order.h"

namespace ravel::plan {
namespace {

class RankRun {
 public:
  RankRun(const ShardingPlan& plan,
          const std::vector<const StepProgram*>& programs,
          RankOrder order)
      : plan_(plan), programs_(programs), ranks_(programs.size()) {
    CHECK_EQ(static_cast<int64_t>(programs.size()), plan.mesh.rank_count());
    for (size_t rank = 0; rank < programs.size(); ++rank) {
      const std::vector<Instruction>& instructions = programs[rank]->instructions;
      ranks_[rank].done.assign(instructions.size(), false);
      for (size_t i = 0; i < instructions.size(); ++i) {
        const size_t stream = order == RankOrder::kList ? 0 : StreamIndex(instructions[i].stream);
        ranks_[rank].queues[stream].push_back(static_cast<int>(i));
      }
    }
  }

  absl::Status Run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        for (size_t stream = 0; stream < kStreamCount; ++stream) {
          ASSIGN_OR_RETURN(const bool advanced, Advance(rank, stream));
          moved |= advanced;
        }
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (size_t stream = 0; stream < kStreamCount; ++stream) {
        if (Head(rank, stream) >= 0) {
          return absl::FailedPreconditionError(
              absl::StrCat("K5: rank ", rank, " waits for ever: ", Name(rank, stream)));
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Rank {
    std::array<std::vector<int>, kStreamCount> queues;
    std::array<size_t, kStreamCount> next = {};
    std::vector<bool> done;
  };

  // The instruction that the stream has come to, or -1 at its end.
  int Head(size_t rank, size_t stream) const {
    const Rank& at = ranks_[rank];
    return at.next[stream] < at.queues[stream].size() ? at.queues[stream][at.next[stream]] : -1;
  }
  const Instruction& HeadOf(size_t rank, size_t stream) const {
    return programs_[rank]->instructions[static_cast<size_t>(Head(rank, stream))];
  }
  std::string Name(size_t rank, size_t stream) const {
    return InstructionName(*programs_[rank], Head(rank, stream));
  }
  bool Ready(size_t rank, size_t stream) const {
    if (Head(rank, stream) < 0) {
      return false;
    }
    const std::vector<InstructionId>& waits = HeadOf(rank, stream).waits;
    return std::all_of(waits.begin(), waits.end(), [&](InstructionId wait) {
      return ranks_[rank].done[static_cast<size_t>(wait)];
    });
  }
  void Finish(size_t rank, size_t stream) {
    ranks_[rank].done[static_cast<size_t>(Head(rank, stream))] = true;
    ++ranks_[rank].next[stream];
  }

  // The axes over which the ranks of a collective meet.
  const std::vector<std::string>& AxesOf(const Instruction& at) const {
    return plan_.moves.moves[at.move].axes;
  }
  bool Meet(size_t a, size_t b, const std::vector<std::string>& axes) const {
    const std::vector<int64_t> group = plan_.mesh.GroupOf(static_cast<int64_t>(a), axes);
    return std::find(group.begin(), group.end(), static_cast<int64_t>(b)) != group.end();
  }

  // Lets the head of a stream go on, together with those that it meets.
  absl::StatusOr<bool> Advance(size_t rank, size_t stream) {
    if (!Ready(rank, stream)) {
      return false;
    }
    const Instruction& mine = HeadOf(rank, stream);
    if (!IsCollective(mine.op)) {
      Finish(rank, stream);
      return true;
    }
    const std::vector<std::string>& axes = AxesOf(mine);
    bool all = true;
    for (size_t other = 0; other < ranks_.size(); ++other) {
      if (!Meet(rank, other, axes)) {
        continue;
      }
      if (!Ready(other, stream) || !IsCollective(HeadOf(other, stream).op) ||
          AxesOf(HeadOf(other, stream)) != axes) {
        all = false;
        continue;
      }
      const Instruction& theirs = HeadOf(other, stream);
      if (theirs.stream == mine.stream &&
          (theirs.op != mine.op || theirs.move != mine.move || theirs.group != mine.group ||
           theirs.call != mine.call)) {
        return absl::FailedPreconditionError(absl::StrCat("K4: rank ",
                                                          rank,
                                                          " issues ",
                                                          Name(rank, stream),
                                                          ", rank ",
                                                          other,
                                                          " ",
                                                          Name(other, stream)));
      }
      all = all && theirs.stream == mine.stream;
    }
    for (size_t other = 0; all && other < ranks_.size(); ++other) {
      if (Meet(rank, other, axes)) {
        Finish(other, stream);
      }
    }
    return all;
  }

  const ShardingPlan& plan_;
  const std::vector<const StepProgram*>& programs_;
  std::vector<Rank> ranks_;
};

}  // namespace

absl::Status CheckRanks(const ShardingPlan& plan,
                        const std::vector<const StepProgram*>& programs,
                        RankOrder order) {
  return RankRun(plan, programs, order).Run();
}

absl::Status CheckSameCollectives(const StepProgram& a, const StepProgram& b) {
  const auto collectives = [](const StepProgram& program) {
    std::vector<InstructionId> found;
    for (const InstructionId i : program.instructions.ids()) {
      if (IsCollective(program.instructions[i].op)) {
        found.push_back(i);
      }
    }
    return found;
  };
  const std::vector<InstructionId> in_a = collectives(a);
  const std::vector<InstructionId> in_b = collectives(b);
  for (size_t i = 0; i < std::max(in_a.size(), in_b.size()); ++i) {
    if (i >= in_a.size() || i >= in_b.size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("K4: one rank issues ", in_a.size(), " collectives, another ", in_b.size()));
    }
    const Instruction& x = a.instructions[in_a[i]];
    const Instruction& y = b.instructions[in_b[i]];
    if (x.op != y.op || x.move != y.move || x.unit != y.unit || x.group != y.group ||
        x.call != y.call) {
      return absl::FailedPreconditionError(absl::StrCat("K4: one rank issues ",
                                                        InstructionName(a, in_a[i]),
                                                        ", another ",
                                                        InstructionName(b, in_b[i])));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::plan
