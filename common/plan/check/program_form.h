#pragma once

// Rules K5 and K14, and the form of instructions.

#include <vector>

#include "common/plan/check/program_facts.h"
#include "common/status.h"

namespace ravel::plan {

// The stream of an instruction: of a collective that of its move, of an update by where it runs
// (HostUpdates), else of the op.
StreamId StreamOf(const MoveTable& table,
                  const IdVector<GroupId, bool>& on_host,
                  const Instruction& instruction);

// K5, K14, fields, operands and the order of compute instructions, before anything else is known.
// `on_host`: the groups that the host updates. `use_at`: the instruction of each of the model's
// uses, the last of several steps; `use_begins`: the first.
absl::Status CheckForm(const ShardingPlan& plan,
                       const OperandContext& context,
                       const IdVector<GroupId, bool>& on_host,
                       const StepProgram& program,
                       std::vector<InstructionId>& use_at,
                       std::vector<InstructionId>& use_begins);

}  // namespace ravel::plan
