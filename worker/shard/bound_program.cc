#include "worker/shard/bound_program.h"

#include <utility>

#include "common/check.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_crossing.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;
using plan::Role;

class Binder {
 public:
  Binder(const plan::ShardingPlan& plan,
         const ArenaBuffers& buffers,
         const std::vector<TensorView>& shared,
         const quant::QuantState* quant)
      : plan_(plan),
        buffers_(buffers),
        shared_(shared),
        quant_(quant),
        group_of_(plan.inventory.tensors.size()) {
    for (const plan::GroupId group : plan.groups.ids()) {
      for (const plan::TensorId tensor : plan.groups[group].tensors) {
        group_of_[tensor] = group;
      }
    }
  }

  BoundInstruction Bind(const Instruction& instruction, plan::Phase phase) const {
    BoundInstruction bound;
    bound.instruction = instruction;
    if (!plan::IsCompute(instruction.op)) {
      return bound;
    }
    const std::vector<plan::BufferId> weights = plan::BuffersOf(instruction, Role::kWeights);
    const std::vector<plan::BufferId> gradients = plan::BuffersOf(instruction, Role::kGradient);
    const plan::UnitSpec& unit = plan_.inventory.units[instruction.unit];
    for (const plan::TensorId tensor : unit.tensors) {
      bound.memory.weights.push_back(View(tensor, weights));
      CHECK_MSG(bound.memory.weights.back().present(), "a unit's own weights are not gathered");
    }
    for (const plan::TensorId tensor : unit.borrowed) {
      bound.memory.weights.push_back(View(tensor, weights));
    }
    BindScales(unit, phase != plan::Phase::kEval, bound.memory);
    if (instruction.op == OpCode::kBackward) {
      for (const std::vector<plan::TensorId>* tensors : {&unit.tensors, &unit.borrowed}) {
        for (const plan::TensorId tensor : *tensors) {
          bound.gradients.push_back(View(tensor, gradients));
          const bool trainable = plan_.inventory.tensors[tensor].trainable;
          CHECK_EQ(bound.gradients.back().present(), trainable);
        }
      }
    }
    bound.memory.saved = Activations(unit.saved, plan::BufferOf(instruction, Role::kSaved));
    bound.memory.remade = Activations(unit.remade, plan::BufferOf(instruction, Role::kRemade));
    bound.memory.workspace =
        Activations(unit.workspace, plan::BufferOf(instruction, Role::kScratch));
    bound.memory.leaves = Activations(unit.leaves, plan::BufferOf(instruction, Role::kLeaves));
    bound.memory.shared = shared_;
    return bound;
  }

 private:
  void BindScales(const plan::UnitSpec& unit, bool stages, model::UnitMemory& memory) const {
    if (quant_ == nullptr) {
      return;
    }
    for (const std::vector<plan::TensorId>* tensors : {&unit.tensors, &unit.borrowed}) {
      for (const plan::TensorId tensor : *tensors) {
        memory.scales.push_back(quant_->Has(tensor) ? quant_->ScalesOf(tensor, stages)
                                                    : quant::GemmScales());
      }
    }
  }

  // The tensor in that buffer of the list that holds its group; without data when none does.
  TensorView View(plan::TensorId tensor, const std::vector<plan::BufferId>& list) const {
    const plan::GroupId group = group_of_[tensor];
    std::byte* base = nullptr;
    DType dtype = DType::kF32;
    for (const plan::BufferId buffer : list) {
      if (plan_.buffers[buffer].group == group) {
        CHECK_MSG(base == nullptr, "two buffers of one group in one list");
        base = buffers_.bytes(buffer);
        dtype = plan_.buffers[buffer].dtype;
      }
    }
    const bool codes =
        base != nullptr && dtype == plan::WeightTypeOf(plan_.groups[group], plan_.options);
    return GroupView(plan_.inventory,
                     plan_.groups[group],
                     tensor,
                     base,
                     dtype,
                     codes ? plan::CodesPerByte(plan_.groups[group].recipe) : 1);
  }

  std::vector<TensorView> Activations(const std::vector<plan::ActivationSpec>& specs,
                                      plan::BufferId buffer) const {
    return specs.empty() || buffer < 0 ? std::vector<TensorView>()
                                       : ActivationViews(specs, buffers_.bytes(buffer));
  }

  const plan::ShardingPlan& plan_;
  const ArenaBuffers& buffers_;
  const std::vector<TensorView>& shared_;
  const quant::QuantState* const quant_;
  plan::IdVector<plan::TensorId, plan::GroupId> group_of_;
};

// A free happens when the last instruction before it that touches the buffer is done.
void AttachFrees(const plan::StepProgram& planned, BoundProgram& program) {
  auto& list = program.instructions;
  for (const plan::InstructionId i : list.ids()) {
    if (list[i].instruction.op != OpCode::kFree) {
      continue;
    }
    const plan::InstructionId last = plan::AwaitedBy(planned, i);
    list[i].freed_with = last;
    (last >= 0 ? list[last].frees : program.first_frees).push_back(i);
  }
}

}  // namespace

std::vector<BoundProgram> BindPrograms(const plan::ShardingPlan& plan,
                                       const ArenaBuffers& buffers,
                                       const std::vector<TensorView>& shared,
                                       const quant::QuantState* quant) {
  const Binder binder(plan, buffers, shared, quant);
  std::vector<BoundProgram> programs;
  for (const plan::StepProgram& program : plan.programs) {
    BoundProgram bound;
    bound.phase = program.phase;
    bound.part = program.part;
    for (const Instruction& instruction : program.instructions) {
      bound.instructions.push_back(binder.Bind(instruction, program.phase));
    }
    AttachFrees(program, bound);
    programs.push_back(std::move(bound));
  }
  return programs;
}

}  // namespace ravel::shard
