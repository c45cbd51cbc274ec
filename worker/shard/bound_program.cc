#include "worker/shard/bound_program.h"

#include <utility>

#include "common/check.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;
using plan::Role;

class Binder {
 public:
  Binder(const plan::ShardingPlan& plan,
         const ArenaBuffers& buffers,
         const std::vector<TensorView>& shared)
      : plan_(plan),
        buffers_(buffers),
        shared_(shared),
        weight_type_(plan.options.weight_type),
        group_of_(plan.inventory.tensors.size()) {
    for (size_t group = 0; group < plan.groups.size(); ++group) {
      for (const int tensor : plan.groups[group].tensors) {
        group_of_[static_cast<size_t>(tensor)] = static_cast<int>(group);
      }
    }
  }

  BoundInstruction Bind(const Instruction& instruction) const {
    BoundInstruction bound;
    bound.instruction = instruction;
    if (!plan::IsCompute(instruction.op)) {
      return bound;
    }
    const std::vector<int> weights = plan::BuffersOf(instruction, Role::kWeights);
    const std::vector<int> gradients = plan::BuffersOf(instruction, Role::kGradient);
    const plan::UnitSpec& unit = plan_.inventory.units[static_cast<size_t>(instruction.unit)];
    for (const int tensor : unit.tensors) {
      bound.memory.weights.push_back(View(tensor, weights, weight_type_));
      CHECK_MSG(bound.memory.weights.back().present(), "a unit's own weights are not gathered");
    }
    for (const int tensor : unit.borrowed) {
      bound.memory.weights.push_back(View(tensor, weights, weight_type_));
    }
    if (instruction.op == OpCode::kBackward) {
      for (const std::vector<int>* tensors : {&unit.tensors, &unit.borrowed}) {
        for (const int tensor : *tensors) {
          bound.gradients.push_back(View(tensor, gradients, DType::kF32));
          const bool trainable = plan_.inventory.tensors[static_cast<size_t>(tensor)].trainable;
          CHECK_EQ(bound.gradients.back().present(), trainable);
        }
      }
    }
    bound.memory.saved = Activations(unit.saved, plan::BufferOf(instruction, Role::kSaved));
    bound.memory.remade = Activations(unit.remade, plan::BufferOf(instruction, Role::kRemade));
    bound.memory.workspace =
        Activations(unit.workspace, plan::BufferOf(instruction, Role::kScratch));
    bound.memory.shared = shared_;
    return bound;
  }

 private:
  // The tensor in that buffer of the list that holds its group; without data when none does.
  TensorView View(int tensor, const std::vector<int>& list, DType dtype) const {
    const int group = group_of_[static_cast<size_t>(tensor)];
    std::byte* base = nullptr;
    for (const int buffer : list) {
      if (plan_.buffers[static_cast<size_t>(buffer)].group == group) {
        CHECK_MSG(base == nullptr, "two buffers of one group in one list");
        base = buffers_.bytes(buffer);
      }
    }
    return GroupView(
        plan_.inventory, plan_.groups[static_cast<size_t>(group)], tensor, base, dtype);
  }

  std::vector<TensorView> Activations(const std::vector<plan::ActivationSpec>& specs,
                                      int buffer) const {
    return specs.empty() || buffer < 0 ? std::vector<TensorView>()
                                       : ActivationViews(specs, buffers_.bytes(buffer));
  }

  const plan::ShardingPlan& plan_;
  const ArenaBuffers& buffers_;
  const std::vector<TensorView>& shared_;
  const DType weight_type_;
  std::vector<int> group_of_;  // by tensor
};

// A free happens when the last instruction before it that touches the buffer is done.
void AttachFrees(BoundProgram& program) {
  std::vector<BoundInstruction>& list = program.instructions;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].instruction.op != OpCode::kFree) {
      continue;
    }
    size_t last = i;
    while (last > 0 && !plan::Touches(list[last - 1].instruction, list[i].instruction.freed)) {
      --last;
    }
    if (last == 0) {
      program.first_frees.push_back(static_cast<int>(i));
      continue;
    }
    list[i].freed_with = static_cast<int>(last) - 1;
    list[last - 1].frees.push_back(static_cast<int>(i));
  }
}

}  // namespace

std::vector<BoundProgram> BindPrograms(const plan::ShardingPlan& plan,
                                       const ArenaBuffers& buffers,
                                       const std::vector<TensorView>& shared) {
  const Binder binder(plan, buffers, shared);
  std::vector<BoundProgram> programs;
  for (const plan::StepProgram& program : plan.programs) {
    BoundProgram bound;
    bound.phase = program.phase;
    bound.part = program.part;
    for (const Instruction& instruction : program.instructions) {
      bound.instructions.push_back(binder.Bind(instruction));
    }
    AttachFrees(bound);
    programs.push_back(std::move(bound));
  }
  return programs;
}

}  // namespace ravel::shard
