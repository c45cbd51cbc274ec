#include "common/plan/program/program_uses.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ravel::plan {
namespace {

// The groups that hold the unit's own tensors and those that it borrows.
IdVector<UnitId, std::vector<GroupId>> GroupsOfUnits(const ModelInventory& inventory,
                                                     const GroupLayouts& groups) {
  IdVector<UnitId, std::vector<GroupId>> found(inventory.units.size());
  IdVector<TensorId, GroupId> group_of(inventory.tensors.size());
  for (const GroupId group : groups.ids()) {
    found[groups[group].unit].push_back(group);
    for (const TensorId tensor : groups[group].tensors) {
      group_of[tensor] = group;
    }
  }
  for (const UnitId unit : found.ids()) {
    for (const TensorId tensor : inventory.units[unit].borrowed) {
      const GroupId group = group_of[tensor];
      if (std::find(found[unit].begin(), found[unit].end(), group) == found[unit].end()) {
        found[unit].push_back(group);
      }
    }
  }
  return found;
}

// Adds the backward calls to the forward ones.
class BackwardUses {
 public:
  BackwardUses(const ModelInventory& inventory, const GroupLayouts& groups, ModelUses& made)
      : inventory_(inventory), groups_(groups), made_(made) {}

  void Add() {
    const size_t forwards = made_.uses.size();
    size_t lowest = forwards;
    for (size_t use = forwards; use-- > 0;) {
      const std::vector<GroupId>& needs = made_.uses[use].needs;
      if (std::any_of(needs.begin(), needs.end(), [&](GroupId group) { return Trains(group); })) {
        lowest = use;
      }
    }
    for (size_t use = forwards; use-- > lowest;) {
      AddBackward(use);
    }
  }

 private:
  bool Trains(GroupId group) const { return groups_[group].trainable; }

  void AddBackward(size_t forward) {
    const size_t at = made_.uses.size();
    UnitUse use = made_.uses[forward];
    const UnitSpec& unit = inventory_.units[use.unit];
    use.op = OpCode::kBackward;
    use.remakes = !unit.remade.empty() && at != forward + 1;
    use.steps = StepsOf(inventory_, use.unit, UnitPass::kBackward);
    use.remake_steps = StepsOf(inventory_, use.unit, UnitPass::kRecompute);
    for (const GroupId group : use.needs) {
      if (Trains(group)) {
        use.gradients.push_back(GradientOf(group, use.unit, at));
      }
    }
    if (unit.kind == UnitKind::kEmbedding || unit.kind == UnitKind::kPositions) {
      const auto unread = [&](GroupId group) { return !Trains(group); };
      use.needs.erase(std::remove_if(use.needs.begin(), use.needs.end(), unread), use.needs.end());
    }
    made_.uses.push_back(std::move(use));
  }

  bool IsAddend(GroupId group) const {
    return inventory_.tensors[groups_[group].tensors.front()].cut.partial_gradient;
  }

  GradientId GradientOf(GroupId group, UnitId writer, size_t use) {
    const auto [found, added] =
        index_.emplace(std::make_pair(group, writer), made_.gradients.end_id());
    if (added) {
      made_.gradients.push_back(
          {.group = group,
           .call = GradientCallsOf(made_, group),
           .first_use = use,
           .last_use = use,
           .written_once = inventory_.units[writer].kind == UnitKind::kLayer && !IsAddend(group)});
    } else {
      made_.gradients[found->second].last_use = use;
      made_.gradients[found->second].written_once = false;
    }
    return found->second;
  }

  const ModelInventory& inventory_;
  const GroupLayouts& groups_;
  ModelUses& made_;
  std::map<std::pair<GroupId, UnitId>, GradientId> index_;  // by group and writing unit
};

bool Reads(const SegmentSpec& segment, ActivationList list) {
  return std::any_of(segment.uses.begin(), segment.uses.end(), [&](const SegmentUse& use) {
    return use.list == list && use.reads;
  });
}

// Addends of chunks take turns in two buffers: one is moved while the next is computed.
int AddendSlot(const SegmentSpec& segment) {
  return segment.chunked && segment.chunks > 1 ? 1 + segment.chunk % 2 : 0;
}

SegmentStep::Touches TouchesOf(const std::vector<SegmentSpec>& segments, const SegmentStep& step) {
  SegmentStep::Touches touches;
  for (SegmentId id = step.first; id < step.end; ++id) {
    const SegmentSpec& segment = segments[static_cast<size_t>(id.value())];
    touches.weights = touches.weights || !segment.weights.empty();
    touches.gradients = touches.gradients || !segment.gradients.empty();
    std::vector<SegmentUse> uses = segment.uses;
    if (segment.move != SegmentMove::kNone) {
      uses.push_back(segment.target);
    }
    for (const SegmentUse& use : uses) {
      (use.reads && !use.writes ? touches.reads : touches.changes).push_back(use.list);
    }
  }
  return touches;
}

}  // namespace

std::vector<SegmentStep> StepsOf(const ModelInventory& inventory, UnitId unit, UnitPass pass) {
  if (TensorRanks(inventory) == 1) {
    return {SegmentStep()};
  }
  const std::vector<SegmentSpec> segments = SegmentsOf(inventory, unit, pass);
  std::vector<SegmentStep> steps;
  SegmentId at = 0;
  for (const SegmentSpec& segment : segments) {
    const bool alone = segment.move != SegmentMove::kNone;
    const bool reads_sum = Reads(segment, ActivationList::kInputGradient);
    if (alone || reads_sum || steps.empty() || steps.back().move != SegmentMove::kNone) {
      steps.push_back({.first = at, .end = at, .move = segment.move});
    }
    SegmentStep& step = steps.back();
    step.end = ++at;
    step.addend = step.addend || segment.addend;
    step.input_gradient = step.input_gradient || reads_sum;
    step.sums_input_gradient = alone && segment.target.list == ActivationList::kInputGradient;
    step.addend_slot = std::max(step.addend_slot, AddendSlot(segment));
  }
  // The first step of a pass begins the lives of its buffers, and the last one ends them.
  for (size_t i = 1; i + 1 < steps.size(); ++i) {
    const SegmentSpec& first = segments[static_cast<size_t>(steps[i].first.value())];
    if (steps[i].move != SegmentMove::kNone || first.chunk > 0) {
      steps[i].beside = TouchesOf(segments, steps[i]);
    }
  }
  return steps;
}

std::vector<SegmentSpec> SegmentsOfStep(const ModelInventory& inventory, const Instruction& at) {
  // The segments of a training forward are the first ones of an evaluation.
  const UnitPass pass = at.op == OpCode::kBackward    ? UnitPass::kBackward
                        : at.op == OpCode::kRecompute ? UnitPass::kRecompute
                                                      : UnitPass::kEvaluate;
  std::vector<SegmentSpec> segments = SegmentsOf(inventory, at.unit, pass);
  std::vector<SegmentSpec> found;
  for (const SegmentStep& step : StepsOf(inventory, at.unit, pass)) {
    for (SegmentId id = step.first; step.first == at.segment && id < step.end; ++id) {
      found.push_back(std::move(segments[static_cast<size_t>(id.value())]));
    }
  }
  return found;
}

const SegmentStep* FindStep(const UnitUse& use, const Instruction& at) {
  const std::vector<SegmentStep>& steps =
      at.op == OpCode::kRecompute ? use.remake_steps : use.steps;
  const auto found = std::find_if(steps.begin(), steps.end(), [&](const SegmentStep& step) {
    return step.first == at.segment;
  });
  return found == steps.end() ? nullptr : &*found;
}

bool IsLastStep(const UnitUse& use, const Instruction& at) {
  const std::vector<SegmentStep>& steps =
      at.op == OpCode::kRecompute ? use.remake_steps : use.steps;
  return !steps.empty() && steps.back().first == at.segment;
}

ModelUses UsesOf(const ModelInventory& inventory, const GroupLayouts& groups, bool trains) {
  const IdVector<UnitId, std::vector<GroupId>> needs = GroupsOfUnits(inventory, groups);
  ModelUses made;
  IdVector<UnitId, int> calls(inventory.units.size(), 0);
  const UnitPass pass = trains ? UnitPass::kForward : UnitPass::kEvaluate;
  for (const UnitId unit : inventory.calls()) {
    made.uses.push_back({.op = OpCode::kForward,
                         .unit = unit,
                         .call = calls[unit]++,
                         .remakes = false,
                         .needs = needs[unit],
                         .gradients = {},
                         .steps = StepsOf(inventory, unit, pass)});
  }
  if (trains) {
    BackwardUses(inventory, groups, made).Add();
  }
  return made;
}

int CallsOf(const ModelInventory& inventory, UnitId unit) {
  const std::vector<UnitId> calls = inventory.calls();
  return static_cast<int>(std::count(calls.begin(), calls.end(), unit));
}

int GradientCallsOf(const ModelUses& uses, GroupId group) {
  return static_cast<int>(
      std::count_if(uses.gradients.begin(), uses.gradients.end(), [&](const GradientCall& call) {
        return call.group == group;
      }));
}

const GradientCall* FindGradient(const ModelUses& uses, GroupId group, int call) {
  for (const GradientCall& gradient : uses.gradients) {
    if (gradient.group == group && gradient.call == call) {
      return &gradient;
    }
  }
  return nullptr;
}

}  // namespace ravel::plan
