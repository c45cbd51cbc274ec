#pragma once

// Step programs with addresses in place of buffer ids, ready to be replayed.

#include <memory>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "worker/model/module.h"
#include "worker/shard/flat_buffer.h"

namespace ravel::shard {

struct BoundInstruction {
  plan::Instruction instruction;
  model::UnitMemory memory;           // kForward, kRecompute, kBackward
  std::vector<TensorView> gradients;  // kBackward: of UnitSpec::tensors, then borrowed; a frozen
                                      // tensor's has no data
  // kFree instructions that come into force when this one is done: its buffers' last uses.
  std::vector<plan::InstructionId> frees;
  plan::InstructionId freed_with = {};  // kFree: the instruction in whose `frees` it is
};

struct BoundProgram {
  plan::Phase phase = plan::Phase::kOnly;
  plan::LanePart part = plan::LanePart::kWhole;
  plan::IdVector<plan::InstructionId, BoundInstruction> instructions;
  // kFree instructions of what the program before left and nothing here uses.
  std::vector<plan::InstructionId> first_frees;
};

// Plan, buffers and `quant` (nullptr: nothing is quantized) outlive the result. Tensors are found
// through the group that holds them.
std::vector<BoundProgram> BindPrograms(const plan::ShardingPlan& plan,
                                       const ArenaBuffers& buffers,
                                       const std::vector<TensorView>& shared,
                                       const quant::QuantState* quant = nullptr);

}  // namespace ravel::shard
