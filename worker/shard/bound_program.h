#pragma once

// Step programs with addresses in place of buffer ids, ready to be replayed.

#include <memory>
#include <vector>

#include "common/model/segments.h"
#include "common/plan/sharding_plan.h"
#include "worker/model/module.h"
#include "worker/shard/flat_buffer.h"

namespace ravel::shard {

struct BoundInstruction {
  plan::Instruction instruction;
  model::UnitMemory memory;           // kForward, kRecompute, kBackward
  std::vector<TensorView> gradients;  // kBackward: of UnitSpec::tensors, then borrowed; a frozen
                                      // tensor's has no data
  bool accumulates = false;           // kBackward: gradients hold earlier micro-batches or calls
  // Of a step of a pass: its segments; none: all of the pass.
  std::vector<plan::SegmentKind> segments;
  plan::SegmentMove move = plan::SegmentMove::kNone;
  TensorView target;  // of a move
  bool last_step = true;
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
// through the group that holds them. `rank`: of the plan's mesh.
std::vector<BoundProgram> BindPrograms(const plan::ShardingPlan& plan,
                                       const ArenaBuffers& buffers,
                                       int64_t rank,
                                       const std::vector<TensorView>& shared,
                                       const quant::QuantState* quant = nullptr);

}  // namespace ravel::shard
