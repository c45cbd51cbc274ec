#pragma once

// One program as the rules of the checker see it. Internal to program_checker and its parts.

#include <string>
#include <vector>

#include "common/plan/buffer_index.h"
#include "common/plan/program_operands.h"
#include "common/plan/program_order.h"
#include "common/plan/program_uses.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

struct ProgramFacts {
  const ShardingPlan& plan;
  const StepProgram& program;
  const BufferIndex& index;
  const ModelUses& model;
  HappensBefore order;
  std::vector<Lifetime> lifetimes;    // of temporaries
  std::vector<InstructionId> use_at;  // of each of model.uses

  InstructionId last() const { return program.instructions.last_id(); }
  const Instruction& At(InstructionId instruction) const {
    return program.instructions[instruction];
  }
  bool Updates() const { return program.phase == Phase::kOnly || program.phase == Phase::kLast; }
  // What stays gathered, or is cut among replicas, is renewed.
  bool RenewsWeights() const {
    return program.phase == Phase::kOnly || program.phase == Phase::kFirst ||
           program.phase == Phase::kEval;
  }
  bool Opens() const { return program.part == LanePart::kWhole || program.part == LanePart::kOpen; }
  bool Closes() const {
    return program.phase != Phase::kEval &&
           (program.part == LanePart::kWhole || program.part == LanePart::kClose);
  }
  bool Before(InstructionId a, InstructionId b) const { return order.Before(a, b); }
  absl::Status Fault(const char* rule, InstructionId instruction, const std::string& what) const;
  const std::string& BufferName(BufferId id) const { return plan.buffers[id].name; }
};

StreamId StreamOf(OpCode op);

// K5, K14, fields, operands and the order of compute instructions, before anything else is known.
absl::Status CheckForm(const ShardingPlan& plan,
                       const OperandContext& context,
                       const StepProgram& program,
                       std::vector<InstructionId>& use_at);
// K1: weights are gathered, newest, and not written while they are read.
absl::Status CheckWeights(const ProgramFacts& facts);
// K2, K3: every two accesses of which one writes are ordered.
absl::Status CheckMemory(const ProgramFacts& facts);
// K7, K9: each gradient is staged, summed and used once.
absl::Status CheckGradients(const ProgramFacts& facts);
// K6, K10: byte windows as caps, and prefetch that overlaps.
absl::Status CheckWindows(const ProgramFacts& facts);

// K11, K12, K13 of a whole plan.
absl::Status CheckPlaces(const ShardingPlan& plan);

}  // namespace ravel::plan
