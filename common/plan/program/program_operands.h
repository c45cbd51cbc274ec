#pragma once

// Decides which buffers each instruction reads and writes; no other code does. Builders call it at
// the end, the codec for the operands that a stored plan leaves out, and the checker to compare.
// All other code reads Instruction::operands.

#include <cstddef>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/program_moves.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/program/step_program.h"

namespace ravel::plan {

struct OperandContext {
  const ModelInventory& inventory;
  const GroupLayouts& groups;
  const MoveTable& moves;
  const LaneMap& lanes;
  const ProgramOptions& options;
  const BufferIndex& index;
  const ModelUses& model;                  // of the program: of training, or of an evaluation
  const IdVector<GroupId, bool>& on_host;  // HostUpdates
  LanePart part = LanePart::kWhole;
};

// The operands of an instruction by its op, and, where the op is of a group, by group, call and
// move. `use`: the call of a unit that a compute instruction is, as an index into model.uses.
// Whatever does not exist is left out.
std::vector<Operand> OperandsOf(const OperandContext& context, const Instruction& at, size_t use);

// Gives every instruction of a program its operands. Compute instructions are taken to be in the
// order of model.uses, and of the steps of each.
void AddOperands(const OperandContext& context, StepProgram& program);

}  // namespace ravel::plan
