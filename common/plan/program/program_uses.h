#pragma once

// What a micro-batch does, before anybody plans when: the calls of units in order, which groups
// each reads, which gradients it writes.

#include <cstddef>
#include <optional>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/model/segments.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/program/step_program.h"

namespace ravel::plan {

// The part of a call that one instruction is: consecutive segments of the pass, or one with a move
// between ranks of `tensor`. Without such moves a call is one step.
struct SegmentStep {
  SegmentId first = {};  // none: all segments of the pass, and `end` says nothing
  SegmentId end = {};
  SegmentMove move = SegmentMove::kNone;
  bool addend = false;               // a segment of it writes the addend of a sum
  bool input_gradient = false;       // a segment of it reads kInputGradient
  bool sums_input_gradient = false;  // its move writes that
  // The buffer of the addend that it writes or sums: 0, or that of a chunk.
  int addend_slot = 0;
  // A step that runs beside others of its pass has the lists that it reads, or else changes, which
  // are all that it touches of the unit's buffers. Absent: all of them.
  struct Touches {
    std::vector<ActivationList> reads = {};
    std::vector<ActivationList> changes = {};
    bool weights = false;
    bool gradients = false;
  };
  std::optional<Touches> beside = {};
};
std::vector<SegmentStep> StepsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass);

// The segments of a compute instruction that is a step of a pass, of training or, by its forward,
// of an evaluation.
std::vector<SegmentSpec> SegmentsOfStep(const ModelInventory& inventory, const Instruction& at);

// One call of a unit.
struct UnitUse {
  OpCode op = OpCode::kForward;  // or kBackward
  UnitId unit = 0;
  int call = 0;                       // of the unit, in forward order
  bool remakes = false;               // kBackward: kRecompute comes first
  std::vector<GroupId> needs;         // whose weights it reads: its own, then borrowed ones
  std::vector<GradientId> gradients;  // kBackward
  std::vector<SegmentStep> steps = {SegmentStep()};
  std::vector<SegmentStep> remake_steps = {SegmentStep()};  // of kRecompute
};

// A gradient that one unit accumulates in one staging buffer over its backward calls. A group has
// as many as units write it: a tied table two, the head's (call 0) and its own.
struct GradientCall {
  GroupId group = 0;
  int call = 0;          // of the group, in backward order
  size_t first_use = 0;  // writes over whatever is there
  size_t last_use = 0;   // after it the gradient may be reduced
  // True if a micro-batch writes each element once, from one sum in a kernel. Layers do, where they
  // are called once. Embeddings and positions add token by token in memory, heads add chunk by
  // chunk, what is called twice adds to its first call, and addends of ranks of `tensor` are
  // summed.
  bool written_once = false;
};

// The step of a use that an instruction is, by its op and segment; nullptr: it is none.
const SegmentStep* FindStep(const UnitUse& use, const Instruction& at);
// True if no step of the call follows in the instruction's pass.
bool IsLastStep(const UnitUse& use, const Instruction& at);

struct ModelUses {
  std::vector<UnitUse> uses;
  IdVector<GradientId, GradientCall> gradients;  // in the order of their first uses
};

// Forward calls in the inventory's order; in training then their backward calls, last first, down
// to the lowest call that writes a gradient. A backward that follows its forward at once finds in
// place what others remake. The backward of embeddings reads no weights of frozen groups.
ModelUses UsesOf(const ModelInventory& inventory, const GroupLayouts& groups, bool trains);

// Calls of a unit in a micro-batch.
int CallsOf(const ModelInventory& inventory, UnitId unit);
// Gradient calls of a group.
int GradientCallsOf(const ModelUses& uses, GroupId group);
// That call of a group; nullptr: there is none.
const GradientCall* FindGradient(const ModelUses& uses, GroupId group, int call);

}  // namespace ravel::plan
