#include "common/plan/program_checker.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/plan/program_builder.h"
#include "common/plan/program_order.h"
#include "common/plan/program_windows.h"

namespace ravel::plan {
namespace {

constexpr int64_t kOffsetAlignment = 256;

StreamId StreamOf(OpCode op) {
  switch (op) {
    case OpCode::kGather:
      return StreamId::kGather;
    case OpCode::kForward:
    case OpCode::kBackward:
    case OpCode::kOptimizerStep:
      return StreamId::kCompute;
    case OpCode::kAllocStaging:
    case OpCode::kReduceScatter:
    case OpCode::kStatsReduce:
    case OpCode::kDecideStep:
      return StreamId::kReduce;
    case OpCode::kFree:
    case OpCode::kEndPhase:
      return StreamId::kHost;
    case OpCode::kRecompute:
      return StreamId::kCompute;
    case OpCode::kAccumulateGrad:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      return StreamId::kReduce;
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
      return StreamId::kOuter;
  }
  return StreamId::kHost;
}

bool Updates(Phase phase) {
  return phase == Phase::kOnly || phase == Phase::kLast;
}

class ProgramCheck {
 public:
  ProgramCheck(const ShardingPlan& plan, const StepProgram& program)
      : plan_(plan), program_(program), index_(plan.buffers) {}

  absl::Status Run() {
    RETURN_IF_ERROR(CheckForm());
    uses_ = UsesOf(plan_.inventory, program_.phase);
    calls_ = GradientCallsOf(plan_.inventory, uses_);
    const HappensBefore order(program_);
    order_ = &order;
    RETURN_IF_ERROR(CheckUses());
    ASSIGN_OR_RETURN(lifetimes_, LifetimesOf(program_, plan_.buffers));
    RETURN_IF_ERROR(CheckWeights());
    RETURN_IF_ERROR(CheckLifetimes());
    RETURN_IF_ERROR(CheckAddresses());
    RETURN_IF_ERROR(CheckGradients());
    RETURN_IF_ERROR(CheckUpdate());
    RETURN_IF_ERROR(CheckEnd());
    return CheckWindows({plan_, program_, order, lifetimes_, use_at_});
  }

 private:
  const Instruction& At(int instruction) const {
    return program_.instructions[static_cast<size_t>(instruction)];
  }
  int Count() const { return static_cast<int>(program_.instructions.size()); }
  absl::Status Fault(const char* rule, int instruction, const std::string& what) const {
    return absl::FailedPreconditionError(
        absl::StrCat(rule, ": ", InstructionName(program_, instruction), ": ", what));
  }
  const std::string& BufferName(int id) const {
    return plan_.buffers[static_cast<size_t>(id)].name;
  }

  // K5, K14 and the fields of each instruction.
  absl::Status CheckForm() const {
    const int units = static_cast<int>(plan_.inventory.units.size());
    if (Count() == 0 || At(Count() - 1).op != OpCode::kEndPhase) {
      return absl::FailedPreconditionError("K8: a program ends with EndPhase");
    }
    for (int i = 0; i < Count(); ++i) {
      const Instruction& at = At(i);
      for (const int wait : at.waits) {
        if (wait < 0 || wait >= i) {
          return Fault(
              "K5", i, absl::StrCat("waits for instruction ", wait, ", not an earlier one"));
        }
        if (At(wait).op == OpCode::kFree) {
          return Fault("K5", i, "waits for a Free, which has no event");
        }
      }
      if (at.stream != StreamOf(at.op)) {
        return Fault("K4", i, absl::StrCat("is on stream ", StreamName(at.stream)));
      }
      if (at.unit < -1 || at.unit >= units) {
        return absl::FailedPreconditionError(absl::StrCat("K1: instruction ", i, " names no unit"));
      }
      for (const int id : {at.gathered,
                           at.borrowed_gathered,
                           at.staging,
                           at.borrowed_staging,
                           at.receive,
                           at.saved,
                           at.workspace,
                           at.freed}) {
        if (id < -1 || id >= static_cast<int>(plan_.buffers.size())) {
          return Fault("K1", i, absl::StrCat("names no buffer: ", id));
        }
      }
      if ((at.op == OpCode::kGather && at.gathered != Find(BufferKind::kGathered, at.unit)) ||
          (at.op == OpCode::kAllocStaging &&
           at.staging != Find(BufferKind::kStaging, at.unit, at.call))) {
        return Fault("K1", i, "does not fill the buffer of its unit");
      }
      const bool eval_op = at.op == OpCode::kGather || at.op == OpCode::kForward ||
                           at.op == OpCode::kFree || at.op == OpCode::kEndPhase;
      if (program_.phase == Phase::kEval && !eval_op) {
        return Fault("K14", i, "is not part of an evaluation");
      }
      if (at.op == OpCode::kEndPhase && i != Count() - 1) {
        return Fault("K8", i, "is not the last instruction");
      }
    }
    return absl::OkStatus();
  }

  // Forward and backward run in the model's order, each with the buffers of its unit.
  absl::Status CheckUses() {
    for (int i = 0; i < Count(); ++i) {
      if (At(i).op != OpCode::kForward && At(i).op != OpCode::kBackward) {
        continue;
      }
      const size_t use = use_at_.size();
      if (use >= uses_.size() || At(i).op != uses_[use].op || At(i).unit != uses_[use].unit) {
        return Fault("K1", i, "is not the next unit in the model's order");
      }
      Instruction expected = ExpectedBuffers(use);
      const Instruction& got = At(i);
      if (got.gathered != expected.gathered || got.borrowed_unit != expected.borrowed_unit ||
          got.borrowed_gathered != expected.borrowed_gathered || got.staging != expected.staging ||
          got.borrowed_staging != expected.borrowed_staging || got.saved != expected.saved ||
          got.workspace != expected.workspace) {
        return Fault("K1", i, "does not use the buffers of its unit");
      }
      use_at_.push_back(i);
    }
    return use_at_.size() == uses_.size()
               ? absl::OkStatus()
               : Fault("K1", Count() - 1, "ends before every unit has run");
  }

  int Find(BufferKind kind, int unit, int call = 0) const {
    return index_.Find({.kind = kind, .unit = unit, .call = call, .slot = 0});
  }

  Instruction ExpectedBuffers(size_t use) const {
    const int unit = uses_[use].unit;
    Instruction expected;
    expected.gathered = Find(BufferKind::kGathered, unit);
    expected.saved = Find(BufferKind::kSaved, unit);
    expected.workspace = Find(BufferKind::kWorkspace, unit);
    for (const int need : uses_[use].needs) {
      if (need != unit) {
        expected.borrowed_unit = need;
        expected.borrowed_gathered = Find(BufferKind::kGathered, need);
      }
    }
    for (const GradientCall& call : calls_[use]) {
      const int staging = Find(BufferKind::kStaging, call.unit, call.call);
      (call.unit == unit ? expected.staging : expected.borrowed_staging) = staging;
    }
    return expected;
  }

  // K1: what each use reads was gathered, and nothing writes weights before all that reads them is
  // done.
  absl::Status CheckWeights() const {
    const bool resident = plan_.options.gather_in_place && program_.phase != Phase::kOnly &&
                          program_.phase != Phase::kFirst && program_.phase != Phase::kEval;
    for (size_t use = 0; use < uses_.size(); ++use) {
      for (const int unit : uses_[use].needs) {
        int gather = -1;
        for (int i = 0; i < use_at_[use]; ++i) {
          if (At(i).op == OpCode::kGather && At(i).unit == unit) {
            gather = i;
          }
        }
        if (!resident && (gather < 0 || !order_->Before(gather, use_at_[use]))) {
          return Fault(
              "K1", use_at_[use], absl::StrCat("may run before the gather of unit ", unit));
        }
      }
    }
    for (int step = 0; step < Count(); ++step) {
      if (At(step).op != OpCode::kOptimizerStep) {
        continue;
      }
      for (int i = 0; i < Count(); ++i) {
        const bool reads = At(i).op == OpCode::kGather || At(i).op == OpCode::kForward ||
                           At(i).op == OpCode::kBackward;
        if (reads && !order_->Before(i, step)) {
          return Fault(
              "K1", step, absl::StrCat("may write weights that instruction ", i, " reads"));
        }
      }
    }
    return absl::OkStatus();
  }

  // K2 by events: a lifetime's birth is before its other accesses, writers before readers.
  absl::Status CheckLifetimes() const {
    for (const Lifetime& life : lifetimes_) {
      for (size_t i = 1; i < life.accesses.size(); ++i) {
        if (!order_->Before(life.accesses[i - 1], life.accesses[i])) {
          return Fault("K2",
                       life.accesses[i],
                       absl::StrCat("is not ordered after instruction ",
                                    life.accesses[i - 1],
                                    " on ",
                                    BufferName(life.buffer)));
        }
      }
    }
    return absl::OkStatus();
  }

  // K3.
  absl::Status CheckAddresses() const {
    for (size_t a = 0; a < lifetimes_.size(); ++a) {
      for (size_t b = a + 1; b < lifetimes_.size(); ++b) {
        const Lifetime& first = lifetimes_[a];
        const Lifetime& second = lifetimes_[b];
        if (Overlap(first.buffer, second.buffer) && !EndsBefore(*order_, first, second) &&
            !EndsBefore(*order_, second, first)) {
          return Fault(
              "K3",
              second.begin,
              absl::StrCat(BufferName(second.buffer), " may overwrite ", BufferName(first.buffer)));
        }
      }
    }
    return absl::OkStatus();
  }

  bool Overlap(int a, int b) const {
    const ProgramBuffer& buffer_a = plan_.buffers[static_cast<size_t>(a)];
    const ProgramBuffer& buffer_b = plan_.buffers[static_cast<size_t>(b)];
    const int64_t offset_a = plan_.memory.offsets[static_cast<size_t>(a)];
    const int64_t offset_b = plan_.memory.offsets[static_cast<size_t>(b)];
    return buffer_a.memory == buffer_b.memory && offset_a < offset_b + buffer_b.bytes &&
           offset_b < offset_a + buffer_a.bytes;
  }

  // K7 and K9: one birth, one writer, one reduce per gradient, in that order.
  absl::Status CheckGradients() const {
    std::vector<GradientCall> expected;
    for (const std::vector<GradientCall>& calls : calls_) {
      expected.insert(expected.end(), calls.begin(), calls.end());
    }
    size_t reduced = 0;
    for (int i = 0; i < Count(); ++i) {
      if (At(i).op != OpCode::kReduceScatter) {
        continue;
      }
      if (reduced >= expected.size() || At(i).unit != expected[reduced].unit ||
          At(i).call != expected[reduced].call ||
          At(i).staging != Find(BufferKind::kStaging, At(i).unit, At(i).call) ||
          At(i).receive != Find(BufferKind::kReceive, At(i).unit, At(i).call)) {
        return Fault("K7", i, "is not the next gradient in backward order");
      }
      ++reduced;
    }
    if (reduced != expected.size()) {
      return Fault("K7", Count() - 1, "ends before every gradient is reduced");
    }
    for (const Lifetime& life : lifetimes_) {
      if (plan_.buffers[static_cast<size_t>(life.buffer)].kind != BufferKind::kStaging) {
        continue;
      }
      if (life.accesses.size() != 3 || At(life.accesses[1]).op != OpCode::kBackward ||
          At(life.accesses[2]).op != OpCode::kReduceScatter) {
        return Fault("K9",
                     life.begin,
                     absl::StrCat(BufferName(life.buffer), " is not written once, then reduced"));
      }
    }
    return absl::OkStatus();
  }

  // K7: statistics of everything, one decision, one update of each unit.
  absl::Status CheckUpdate() const {
    int stats = -1;
    int decide = -1;
    std::vector<int> updates(plan_.inventory.units.size(), 0);
    for (int i = 0; i < Count(); ++i) {
      const OpCode op = At(i).op;
      int* const once = op == OpCode::kStatsReduce  ? &stats
                        : op == OpCode::kDecideStep ? &decide
                                                    : nullptr;
      if (once != nullptr) {
        if (*once >= 0 || !Updates(program_.phase)) {
          return Fault("K7", i, "does not belong here");
        }
        *once = i;
      }
      if (op == OpCode::kOptimizerStep) {
        if (!Updates(program_.phase) || At(i).unit < 0 ||
            updates[static_cast<size_t>(At(i).unit)]++ > 0) {
          return Fault("K7", i, "does not belong here");
        }
        if (decide < 0 || !order_->Before(decide, i)) {
          return Fault("K7", i, "may run before DecideStep");
        }
      }
    }
    if (!Updates(program_.phase)) {
      return absl::OkStatus();
    }
    if (stats < 0 || decide < 0 || !order_->Before(stats, decide) ||
        std::count(updates.begin(), updates.end(), 1) !=
            static_cast<std::ptrdiff_t>(updates.size())) {
      return Fault("K7", Count() - 1, "lacks StatsReduce, DecideStep or an update, or their order");
    }
    for (int i = 0; i < Count(); ++i) {
      const bool counted = At(i).op == OpCode::kReduceScatter || At(i).op == OpCode::kBackward;
      if (counted && !order_->Before(i, stats)) {
        return Fault("K7", stats, absl::StrCat("may run before instruction ", i));
      }
    }
    return absl::OkStatus();
  }

  // K8: EndPhase is after everything.
  absl::Status CheckEnd() const {
    for (int i = 0; i < Count() - 1; ++i) {
      if (At(i).op != OpCode::kFree && !order_->Before(i, Count() - 1)) {
        return Fault("K8", i, "may still run when the program ends");
      }
    }
    return absl::OkStatus();
  }

  const ShardingPlan& plan_;
  const StepProgram& program_;
  const BufferIndex index_;
  const HappensBefore* order_ = nullptr;
  std::vector<UnitUse> uses_;
  std::vector<std::vector<GradientCall>> calls_;
  std::vector<int> use_at_;  // instruction of each use
  std::vector<Lifetime> lifetimes_;
};

int64_t ArenaBytesOf(const BufferPlan& memory, MemoryKind kind) {
  return kind == MemoryKind::kPrivate     ? memory.private_bytes
         : kind == MemoryKind::kSymmetric ? memory.symmetric_bytes
                                          : memory.common_bytes;
}

// K13, and persistent buffers share their bytes with nobody.
absl::Status CheckPlaces(const ShardingPlan& plan) {
  if (plan.memory.offsets.size() != plan.buffers.size()) {
    return absl::FailedPreconditionError("K13: every buffer needs an offset");
  }
  const auto fault = [&](size_t i, const char* what) {
    return absl::FailedPreconditionError(absl::StrCat("K13: ", plan.buffers[i].name, " ", what));
  };
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const ProgramBuffer& a = plan.buffers[i];
    const int64_t begin = plan.memory.offsets[i];
    if (begin < 0 || begin % kOffsetAlignment != 0 || a.bytes < 0 ||
        begin + a.bytes > ArenaBytesOf(plan.memory, a.memory)) {
      return fault(i, "is not aligned or not inside its arena");
    }
    if (a.inside >= 0) {
      const auto outer = static_cast<size_t>(a.inside);
      if (outer >= plan.buffers.size() || begin != plan.memory.offsets[outer] ||
          a.memory != plan.buffers[outer].memory ||
          a.bytes * plan.ranks != plan.buffers[outer].bytes) {
        return fault(i, "is not a rank's part of the buffer that it is inside");
      }
      continue;
    }
    for (size_t j = 0; a.persistent && j < plan.buffers.size(); ++j) {
      const ProgramBuffer& b = plan.buffers[j];
      const int64_t other = plan.memory.offsets[j];
      if (i != j && b.inside < 0 && a.memory == b.memory && begin < other + b.bytes &&
          other < begin + a.bytes) {
        return fault(i, "shares bytes with another buffer");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckProgram(const ShardingPlan& plan, const StepProgram& program) {
  return ProgramCheck(plan, program).Run();
}

absl::Status CheckPlan(const ShardingPlan& plan) {
  RETURN_IF_ERROR(CheckPlaces(plan));
  std::vector<Phase> phases;
  for (const StepProgram& program : plan.programs) {
    phases.push_back(program.phase);
    RETURN_IF_ERROR(CheckProgram(plan, program));
  }
  std::vector<Phase> expected = {Phase::kOnly};
  if (plan.lanes.turns() > 1) {
    expected = {Phase::kFirst, Phase::kLast};
  }
  if (plan.lanes.turns() > 2) {
    expected.insert(expected.begin() + 1, Phase::kMiddle);
  }
  expected.push_back(Phase::kEval);
  if (phases != expected) {
    return absl::FailedPreconditionError("K8: the programs do not fit the number of turns");
  }
  return absl::OkStatus();
}

absl::Status CheckSameCollectives(const StepProgram& a, const StepProgram& b) {
  const auto collectives = [](const StepProgram& program) {
    std::vector<int> found;
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      const OpCode op = program.instructions[i].op;
      if (op == OpCode::kGather || op == OpCode::kReduceScatter || op == OpCode::kStatsReduce) {
        found.push_back(static_cast<int>(i));
      }
    }
    return found;
  };
  const std::vector<int> in_a = collectives(a);
  const std::vector<int> in_b = collectives(b);
  for (size_t i = 0; i < std::max(in_a.size(), in_b.size()); ++i) {
    if (i >= in_a.size() || i >= in_b.size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("K4: one rank issues ", in_a.size(), " collectives, another ", in_b.size()));
    }
    const Instruction& x = a.instructions[static_cast<size_t>(in_a[i])];
    const Instruction& y = b.instructions[static_cast<size_t>(in_b[i])];
    if (x.op != y.op || x.unit != y.unit || x.call != y.call) {
      return absl::FailedPreconditionError(absl::StrCat("K4: one rank issues ",
                                                        InstructionName(a, in_a[i]),
                                                        ", another ",
                                                        InstructionName(b, in_b[i])));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::plan
