// Plans collectives as moves between placements, one axis at a time. kLegalMoves is the whole truth
// about which transition is which collective and what may alias. Flat axes are nested, the inner
// one being cut first, so a sequence gathers outer axes before inner ones and reduces inner ones
// before outer ones. Bytes sent per rank on an axis of k, for n local elements on the larger side:
// n (k - 1) / k, twice that for an all-reduce, 0 for a view.

#include "common/plan/layout/placement_move.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::plan {
namespace {

struct LegalMove {
  PlacementKind from;
  PlacementKind to;
  MoveKind kind;
  bool of_activations_alone = false;
};
// BlockAtomic is looked up as Flat.
constexpr LegalMove kLegalMoves[] = {
    {PlacementKind::kFlat, PlacementKind::kReplicate, MoveKind::kAllGather},
    {PlacementKind::kPartial, PlacementKind::kReplicate, MoveKind::kAllReduce},
    {PlacementKind::kPartial, PlacementKind::kFlat, MoveKind::kReduceScatter},
    {PlacementKind::kReplicate, PlacementKind::kFlat, MoveKind::kView},
    {PlacementKind::kFlat, PlacementKind::kTensorAtomic, MoveKind::kAllToAll},
    {PlacementKind::kTensorAtomic, PlacementKind::kFlat, MoveKind::kAllToAll},
    {PlacementKind::kReplicate, PlacementKind::kShard, MoveKind::kView},
    {PlacementKind::kPartial, PlacementKind::kShard, MoveKind::kReduceScatter, true},
    {PlacementKind::kShard, PlacementKind::kReplicate, MoveKind::kAllGather, true},
};

PlacementKind FamilyOf(const Placement& placement) {
  return placement.kind == PlacementKind::kBlockAtomic ? PlacementKind::kFlat : placement.kind;
}

absl::Status MoveError(const PlacedTensor& tensor,
                       const AxisPlacement& to,
                       const Placement& from,
                       const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                 tensor.name,
                                                 ": axis ",
                                                 to.axis,
                                                 ": cannot move from ",
                                                 PlacementText(from),
                                                 " to ",
                                                 PlacementText(to.placement),
                                                 ": ",
                                                 why));
}

// Why the nesting of Flat axes forbids a move, or "".
std::string NestingFault(const Mesh& mesh,
                         const Placements& before,
                         const Placement& from,
                         const AxisPlacement& to) {
  const int axis = mesh.AxisIndex(to.axis);
  for (const AxisPlacement& other : before) {
    if (!other.placement.in_flat_family() || other.axis == to.axis) {
      continue;
    }
    const bool other_is_outside = mesh.AxisIndex(other.axis) < axis;
    if (to.placement.kind == PlacementKind::kShard) {
      return absl::StrCat("axis ", other.axis, " is already Flat, and Shard is cut before Flat");
    }
    if (from.in_flat_family() && to.placement.in_flat_family()) {
      return absl::StrCat("axis ", other.axis, " is Flat too; gather it first");
    }
    if (other_is_outside && from.in_flat_family()) {
      return absl::StrCat("axis ", other.axis, " lies outside and must be gathered first");
    }
    if (other_is_outside && to.placement.in_flat_family()) {
      return absl::StrCat("axis ", other.axis, " lies outside and is Flat; inner axis first");
    }
  }
  return "";
}

int OrderClass(const Placement& placement) {
  if (placement.kind == PlacementKind::kShard) {
    return 0;
  }
  return placement.in_flat_family() ? 1 : 2;
}

// `placements` with one axis changed: the new entry goes behind those of its class.
Placements WithAxis(const Placements& placements, const AxisPlacement& to, const Mesh& mesh) {
  Placements changed;
  for (const AxisPlacement& entry : placements) {
    if (entry.axis != to.axis) {
      changed.push_back(entry);
    }
  }
  const auto behind = std::find_if(changed.begin(), changed.end(), [&](const AxisPlacement& entry) {
    return OrderClass(entry.placement) > OrderClass(to.placement);
  });
  changed.insert(behind, to);
  return Canonical(changed, mesh);
}

// Plans moves one after another.
class MoveSequence {
 public:
  MoveSequence(const PlacedTensor& tensor, const Mesh& mesh, Placements from)
      : tensor_(tensor), mesh_(mesh), current_(std::move(from)) {}

  absl::Status Append(const std::string& axis, const Placement& to) {
    ASSIGN_OR_RETURN(Move move, PlanMove(tensor_, mesh_, current_, {axis, to}));
    current_ = move.after;
    moves_.push_back(std::move(move));
    return absl::OkStatus();
  }
  Placement On(std::string_view axis) const { return PlacementOn(current_, axis); }
  const Placements& current() const { return current_; }
  std::vector<Move> Take() { return std::move(moves_); }

 private:
  const PlacedTensor& tensor_;
  const Mesh& mesh_;
  Placements current_;
  std::vector<Move> moves_;
};

bool IsTensorAtomic(const Placement& placement) {
  return placement.kind == PlacementKind::kTensorAtomic;
}

// Leaves TensorAtomic and what is Flat but shall not be, outer axis first.
absl::Status AppendGathers(const Mesh& mesh, const Placements& target, MoveSequence* sequence) {
  for (const MeshAxis& axis : mesh.axes()) {
    const Placement to = PlacementOn(target, axis.name);
    if (IsTensorAtomic(sequence->On(axis.name)) && !IsTensorAtomic(to)) {
      RETURN_IF_ERROR(sequence->Append(axis.name, to.in_flat_family() ? to : Placement::Flat()));
    }
    if (sequence->On(axis.name).in_flat_family() && to.kind == PlacementKind::kReplicate) {
      RETURN_IF_ERROR(sequence->Append(axis.name, to));
    }
  }
  return absl::OkStatus();
}

// Everything else: Shard cuts in the order of the target, then reduces and Flat views, inner axis
// first, then TensorAtomic.
absl::Status AppendCuts(const Mesh& mesh, const Placements& target, MoveSequence* sequence) {
  for (const AxisPlacement& entry : target) {
    if (entry.placement.kind == PlacementKind::kShard &&
        sequence->On(entry.axis) != entry.placement) {
      RETURN_IF_ERROR(sequence->Append(entry.axis, entry.placement));
    }
  }
  for (size_t i = mesh.axes().size(); i-- > 0;) {
    const std::string& axis = mesh.axes()[i].name;
    const Placement to = PlacementOn(target, axis);
    if (IsTensorAtomic(to) && !sequence->On(axis).in_flat_family()) {
      RETURN_IF_ERROR(sequence->Append(axis, Placement::Flat()));
    } else if (!IsTensorAtomic(to) && sequence->On(axis) != to) {
      RETURN_IF_ERROR(sequence->Append(axis, to));
    }
  }
  for (const AxisPlacement& entry : target) {
    if (IsTensorAtomic(entry.placement) && sequence->On(entry.axis) != entry.placement) {
      RETURN_IF_ERROR(sequence->Append(entry.axis, entry.placement));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view MoveKindName(MoveKind kind) {
  switch (kind) {
    case MoveKind::kAllGather:
      return "all-gather";
    case MoveKind::kAllReduce:
      return "all-reduce";
    case MoveKind::kReduceScatter:
      return "reduce-scatter";
    case MoveKind::kAllToAll:
      return "all-to-all";
    case MoveKind::kView:
      return "view";
    case MoveKind::kCopy:
      return "copy";
  }
  return "?";
}

absl::StatusOr<Move> PlanMove(const PlacedTensor& tensor,
                              const Mesh& mesh,
                              const Placements& from,
                              const AxisPlacement& to,
                              BufferUse use) {
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, from, use));
  const Placement now = PlacementOn(from, to.axis);
  if (mesh.AxisIndex(to.axis) < 0) {
    return MoveError(tensor, to, now, absl::StrCat("the mesh is ", mesh.Text()));
  }
  const auto* legal =
      std::find_if(std::begin(kLegalMoves), std::end(kLegalMoves), [&](const LegalMove& candidate) {
        return candidate.from == FamilyOf(now) && candidate.to == FamilyOf(to.placement) &&
               (!candidate.of_activations_alone || use == BufferUse::kActivation);
      });
  if (legal == std::end(kLegalMoves)) {
    return MoveError(tensor, to, now, "there is no such move");
  }
  Move move = {.axis = to.axis,
               .axis_size = mesh.AxisSize(to.axis),
               .from = now,
               .to = to.placement,
               .kind = legal->kind,
               .before = Canonical(from, mesh),
               .after = {}};
  const std::string fault = NestingFault(mesh, move.before, now, to);
  if (!fault.empty()) {
    return MoveError(tensor, to, now, fault);
  }
  if (move.axis_size == 1) {
    const bool reduces = now.kind == PlacementKind::kPartial;
    move.kind = reduces ? MoveKind::kCopy : MoveKind::kView;
  }
  move.after = WithAxis(move.before, to, mesh);
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, move.after, use));
  return move;
}

absl::StatusOr<std::vector<Move>> PlanMoves(const PlacedTensor& tensor,
                                            const Mesh& mesh,
                                            const Placements& from,
                                            const Placements& to) {
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, from, BufferUse::kGradient));
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, to, BufferUse::kGradient));
  const Placements target = Canonical(to, mesh);
  MoveSequence sequence(tensor, mesh, Canonical(from, mesh));
  RETURN_IF_ERROR(AppendGathers(mesh, target, &sequence));
  RETURN_IF_ERROR(AppendCuts(mesh, target, &sequence));
  if (sequence.current() != target) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                   tensor.name,
                                                   ": no moves from ",
                                                   PlacementsText(from),
                                                   " to ",
                                                   PlacementsText(to),
                                                   ": the order of the cuts differs"));
  }
  return sequence.Take();
}

int64_t MoveBytes(const Move& move, const Mesh& mesh, int64_t elements, int64_t element_bytes) {
  if (move.kind == MoveKind::kView || move.kind == MoveKind::kCopy) {
    return 0;
  }
  const int64_t cuts = std::min(CutCount(move.before, mesh), CutCount(move.after, mesh));
  const int64_t bytes = DivCeil(elements, cuts) * element_bytes;
  const int64_t once = DivCeil(bytes * (move.axis_size - 1), move.axis_size);
  return move.kind == MoveKind::kAllReduce ? 2 * once : once;
}

}  // namespace ravel::plan
