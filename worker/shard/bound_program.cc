#include "worker/shard/bound_program.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/program/program_crossing.h"
#include "common/plan/program/program_uses.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

using plan::Instruction;
using plan::OpCode;
using plan::Role;

class Binder {
 public:
  Binder(const plan::ShardingPlan& plan,
         const ArenaBuffers& buffers,
         int64_t rank,
         const std::vector<TensorView>& shared,
         const quant::QuantState* quant)
      : plan_(plan),
        buffers_(buffers),
        coordinate_(rank % plan::TensorRanks(plan.inventory)),
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
    const bool later = instruction.segment > 0;  // which may touch less than the pass
    for (const plan::TensorId tensor : unit.tensors) {
      bound.memory.weights.push_back(View(tensor, weights));
      CHECK_MSG(bound.memory.weights.back().present() || (weights.empty() && later),
                "a unit's own weights are not gathered");
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
          CHECK(bound.gradients.back().present() == trainable || (gradients.empty() && later));
        }
      }
    }
    const auto activations =
        [&](const std::vector<plan::ActivationSpec>& specs, Role role, plan::BufferIndex::Key key) {
          const plan::BufferId named = plan::BufferOf(instruction, role);
          return Activations(specs,
                             named >= 0 || !later ? named : plan::FindBuffer(plan_.buffers, key));
        };
    const plan::UnitId at = instruction.unit;
    bound.memory.saved =
        activations(unit.saved,
                    Role::kSaved,
                    {.kind = plan::BufferKind::kSaved, .owner = at, .call = instruction.call});
    bound.memory.remade =
        activations(unit.remade, Role::kRemade, {.kind = plan::BufferKind::kRemade, .owner = at});
    bound.memory.workspace = activations(
        unit.workspace, Role::kScratch, {.kind = plan::BufferKind::kWorkspace, .owner = at});
    bound.memory.leaves = Activations(unit.leaves, plan::BufferOf(instruction, Role::kLeaves));
    bound.memory.shared = shared_;
    bound.accumulates = plan::Accumulates(instruction);
    if (instruction.segment >= 0) {
      BindStep(phase, bound);
    }
    return bound;
  }

 private:
  static plan::UnitPass PassOf(OpCode op, plan::Phase phase) {
    return op == OpCode::kBackward       ? plan::UnitPass::kBackward
           : op == OpCode::kRecompute    ? plan::UnitPass::kRecompute
           : phase == plan::Phase::kEval ? plan::UnitPass::kEvaluate
                                         : plan::UnitPass::kForward;
  }

  void BindStep(plan::Phase phase, BoundInstruction& bound) const {
    const Instruction& at = bound.instruction;
    const plan::UnitPass pass = PassOf(at.op, phase);
    const std::vector<plan::SegmentSpec> segments =
        plan::SegmentsOf(plan_.inventory, at.unit, pass);
    const std::vector<plan::SegmentStep> steps = plan::StepsOf(plan_.inventory, at.unit, pass);
    const auto step = std::find_if(steps.begin(), steps.end(), [&](const plan::SegmentStep& one) {
      return one.first == at.segment;
    });
    CHECK_MSG(step != steps.end(), "a step of the pass");
    for (plan::SegmentId id = step->first; id < step->end; ++id) {
      bound.segments.push_back(At(segments, id.value()).kind);
      bound.memory.chunk = At(segments, id.value()).chunk;
    }
    bound.move = step->move;
    bound.last_step = step + 1 == steps.end();
    BindMove(At(segments, step->first.value()), step->addend_slot, bound);
  }

  // This rank's rows of what a move makes whole are those of its place on the axis; of a sum whose
  // rows stay where they are, the target. Of a chunk both are those of its tokens.
  void BindMove(const plan::SegmentSpec& segment, int slot, BoundInstruction& bound) const {
    model::UnitMemory& memory = bound.memory;
    const int64_t columns = plan::StreamShape(plan_.inventory)[1];
    const auto find = [&](plan::BufferKind kind, int of_slot) {
      return plan::FindBuffer(plan_.buffers, {.kind = kind, .slot = of_slot});
    };
    const plan::BufferId addend = find(plan::BufferKind::kAddend, slot);
    memory.addend =
        MatrixView(buffers_.floats(addend), DivExact(buffers_.elements(addend), columns), columns);
    memory.input_gradient = Activations({plan::InputGradientSpec(plan_.inventory)},
                                        find(plan::BufferKind::kInputGradient, 0))
                                .front();
    if (segment.move == plan::SegmentMove::kNone) {
      return;
    }
    bound.target = TargetOf(segment.target, bound);
    CHECK(bound.target.contiguous());
    if (segment.chunked) {
      const int64_t rows = DivExact(bound.target.size[0], segment.chunks);
      memory.first_row = segment.chunk * rows;
      bound.target = RowsOf(bound.target, memory.first_row, rows);
    }
    memory.rows = bound.target;
    if (!plan::GathersRows(segment.move)) {
      return;
    }
    memory.rows.size[0] = DivExact(bound.target.size[0], plan::TensorRanks(plan_.inventory));
    memory.rows.data = buffers_.bytes(find(plan::BufferKind::kRows, 0));
    memory.first_row += coordinate_ * memory.rows.size[0];
  }

  const TensorView& TargetOf(const plan::SegmentUse& use, const BoundInstruction& bound) const {
    const plan::UnitSpec& unit = plan_.inventory.units[bound.instruction.unit];
    const model::UnitMemory& memory = bound.memory;
    switch (use.list) {
      case plan::ActivationList::kSaved:
        return memory.saved[model::ActivationIndex(unit.saved, use.name)];
      case plan::ActivationList::kRemade:
        return memory.remade[model::ActivationIndex(unit.remade, use.name)];
      case plan::ActivationList::kWorkspace:
        return memory.workspace[model::ActivationIndex(unit.workspace, use.name)];
      case plan::ActivationList::kInputGradient:
        return memory.input_gradient;
      case plan::ActivationList::kShared:
        break;
    }
    return memory.shared[model::ActivationIndex(plan_.inventory.shared, use.name)];
  }

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
    return GroupView(
        plan_.inventory,
        plan_.groups[group],
        tensor,
        coordinate_,
        {.base = base,
         .dtype = dtype,
         .codes_per_byte = codes ? plan::CodesPerByte(plan_.groups[group].recipe) : int64_t{1}});
  }

  std::vector<TensorView> Activations(const std::vector<plan::ActivationSpec>& specs,
                                      plan::BufferId buffer) const {
    return specs.empty() || buffer < 0 ? std::vector<TensorView>()
                                       : ActivationViews(specs, buffers_.bytes(buffer));
  }

  const plan::ShardingPlan& plan_;
  const ArenaBuffers& buffers_;
  const int64_t coordinate_;  // on the tensor axis
  const std::vector<TensorView>& shared_;
  const quant::QuantState* const quant_;
  plan::IdVector<plan::TensorId, plan::GroupId> group_of_;
};

// Later steps of a backward write gradients as its first one says.
void SpreadAccumulation(BoundProgram& program) {
  bool accumulates = false;
  for (BoundInstruction& bound : program.instructions) {
    if (bound.instruction.op == OpCode::kBackward) {
      accumulates = bound.instruction.segment > 0 ? accumulates : bound.accumulates;
      bound.accumulates = accumulates;
    }
  }
}

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
                                       int64_t rank,
                                       const std::vector<TensorView>& shared,
                                       const quant::QuantState* quant) {
  const Binder binder(plan, buffers, rank, shared, quant);
  std::vector<BoundProgram> programs;
  for (const plan::StepProgram& program : plan.programs) {
    BoundProgram bound;
    bound.phase = program.phase;
    bound.part = program.part;
    for (const Instruction& instruction : program.instructions) {
      bound.instructions.push_back(binder.Bind(instruction, program.phase));
    }
    SpreadAccumulation(bound);
    AttachFrees(program, bound);
    programs.push_back(std::move(bound));
  }
  return programs;
}

}  // namespace ravel::shard
