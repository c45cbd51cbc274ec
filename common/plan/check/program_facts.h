#pragma once

// One program as the rules of the checker see it. Internal to program_checker and its parts.

#include <string>
#include <vector>

#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_operands.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

struct ProgramFacts {
  const ShardingPlan& plan;
  const StepProgram& program;
  const BufferIndex& index;
  const ModelUses& model;
  HappensBefore order;
  std::vector<Lifetime> lifetimes;        // of temporaries
  std::vector<InstructionId> use_at;      // of each of model.uses: its last step
  std::vector<InstructionId> use_begins;  // its first one, without recomputation

  InstructionId last() const { return program.instructions.last_id(); }
  const Instruction& At(InstructionId instruction) const {
    return program.instructions[instruction];
  }
  // The move of a collective.
  const ProgramMove& MoveAt(InstructionId instruction) const {
    return plan.moves.moves[At(instruction).move];
  }
  bool Updates() const { return program.phase == Phase::kOnly || program.phase == Phase::kLast; }
  // True if weights that stay gathered, or are cut among replicas, are renewed.
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

}  // namespace ravel::plan
