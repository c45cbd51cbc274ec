#pragma once

// What a micro-batch does, before anybody plans when: the calls of units in order, which groups
// each reads, which gradients it writes.

#include <cstddef>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/program/step_program.h"

namespace ravel::plan {

// One call of a unit.
struct UnitUse {
  OpCode op = OpCode::kForward;  // or kBackward
  UnitId unit = 0;
  int call = 0;                       // of the unit, in forward order
  bool remakes = false;               // kBackward: kRecompute comes first
  std::vector<GroupId> needs;         // whose weights it reads: its own, then borrowed ones
  std::vector<GradientId> gradients;  // kBackward
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
  // chunk, and what is called twice adds to its first call.
  bool written_once = false;
};

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
