#include "tests/common/plan/layout/strided_import.h"

#include <cstddef>
#include <limits>

#include <absl/strings/str_cat.h>

#include "common/signed_size.h"

namespace ravel::plan {
namespace {

std::string ForeignText(const ForeignPlacement& placement) {
  switch (placement.kind) {
    case ForeignKind::kReplicate:
      return "Replicate";
    case ForeignKind::kShard:
      return absl::StrCat("Shard(", placement.dim, ")");
    case ForeignKind::kStridedShard:
      return absl::StrCat(
          "_StridedShard(", placement.dim, ", split_factor=", placement.split_factor, ")");
  }
  return "?";
}

absl::Status ForeignError(const PlacedTensor& tensor,
                          const MeshAxis& axis,
                          const ForeignPlacement& placement,
                          const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                 tensor.name,
                                                 " ",
                                                 ShapeText(tensor.shape),
                                                 ": axis ",
                                                 axis.name,
                                                 ": ",
                                                 ForeignText(placement),
                                                 ": ",
                                                 what));
}

// Axes enter one after another; each entry may release others that wait on its left.
class CutOrder {
 public:
  CutOrder(const Mesh& mesh, const std::vector<ForeignPlacement>& foreign)
      : mesh_(mesh), foreign_(foreign), entered_(foreign.size(), false) {}

  void Enter(size_t axis) {
    entered_[axis] = true;
    order_.push_back({mesh_.axes()[axis].name, Placement::Shard(foreign_[axis].dim)});
  }
  // Enters every waiting axis left of `limit` that has what it waits for. The leftmost goes first:
  // had one on its right gone before it, its product would have passed its factor.
  void Release(size_t limit) {
    for (size_t axis = 0; axis < limit; ++axis) {
      if (Waits(axis) && EnteredOnTheRight(axis) == foreign_[axis].split_factor) {
        Enter(axis);
        axis = std::numeric_limits<size_t>::max();  // from the left again
      }
    }
  }
  bool Waits(size_t axis) const {
    return foreign_[axis].kind != ForeignKind::kReplicate && !entered_[axis];
  }
  int64_t EnteredOnTheRight(size_t axis) const {
    int64_t product = 1;
    for (size_t other = axis + 1; other < entered_.size(); ++other) {
      if (entered_[other] && foreign_[other].dim == foreign_[axis].dim) {
        product *= mesh_.axes()[other].size;
      }
    }
    return product;
  }
  const Placements& order() const { return order_; }

 private:
  const Mesh& mesh_;
  const std::vector<ForeignPlacement>& foreign_;
  std::vector<bool> entered_;
  Placements order_;
};

absl::Status CheckForeign(const PlacedTensor& tensor,
                          const Mesh& mesh,
                          const std::vector<ForeignPlacement>& foreign) {
  if (foreign.size() != mesh.axes().size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", tensor.name, ": ", foreign.size(), " placements for the mesh ", mesh.Text()));
  }
  for (size_t i = 0; i < foreign.size(); ++i) {
    const ForeignPlacement& placement = foreign[i];
    if (placement.kind == ForeignKind::kReplicate) {
      continue;
    }
    if (placement.dim < 0 || placement.dim >= std::ssize(tensor.shape)) {
      return ForeignError(tensor, mesh.axes()[i], placement, "there is no such dimension");
    }
    if (placement.split_factor < 1 ||
        (placement.kind == ForeignKind::kShard && placement.split_factor != 1)) {
      return ForeignError(tensor, mesh.axes()[i], placement, "split factor out of range");
    }
  }
  return absl::OkStatus();
}

// FSDP cuts dimensions other than 0 evenly or not at all; other pieces have no agreed order.
absl::Status CheckEvenCuts(const PlacedTensor& tensor,
                           const Mesh& mesh,
                           const std::vector<ForeignPlacement>& foreign,
                           const Placements& order) {
  Shape left = tensor.shape;
  for (const AxisPlacement& entry : order) {
    const size_t axis = Size(mesh.AxisIndex(entry.axis));
    const size_t dim = Size(entry.placement.dim);
    const int64_t size = mesh.axes()[axis].size;
    const bool data_axis = entry.axis == kShardAxis || entry.axis == kReplicateAxis;
    const bool strided = foreign[axis].kind == ForeignKind::kStridedShard;
    if (dim != 0 && (data_axis || strided) && left[dim] % size != 0) {
      return ForeignError(
          tensor,
          mesh.axes()[axis],
          foreign[axis],
          absl::StrCat(left[dim],
                       " indices over ",
                       size,
                       " ranks; on dimensions other than 0 this must divide evenly"));
    }
    left[dim] = (left[dim] + size - 1) / size;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Placements> RecoverCutOrder(const PlacedTensor& tensor,
                                           const Mesh& mesh,
                                           const std::vector<ForeignPlacement>& foreign) {
  RETURN_IF_ERROR(CheckForeign(tensor, mesh, foreign));
  CutOrder order(mesh, foreign);
  for (size_t i = 0; i < foreign.size(); ++i) {
    if (foreign[i].kind != ForeignKind::kReplicate && foreign[i].split_factor == 1) {
      order.Enter(i);
      order.Release(i);
    }
  }
  for (size_t i = 0; i < foreign.size(); ++i) {
    if (order.Waits(i)) {
      return ForeignError(tensor,
                          mesh.axes()[i],
                          foreign[i],
                          absl::StrCat("no axes to the right cut dimension ",
                                       foreign[i].dim,
                                       " into as many pieces first; mesh ",
                                       mesh.Text()));
    }
  }
  RETURN_IF_ERROR(CheckEvenCuts(tensor, mesh, foreign, order.order()));
  return order.order();
}

absl::StatusOr<std::vector<ForeignPlacement>> ForeignPlacements(const PlacedTensor& tensor,
                                                                const Mesh& mesh,
                                                                const Placements& placements) {
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, placements, BufferUse::kValues));
  std::vector<ForeignPlacement> foreign(mesh.axes().size());
  std::vector<const AxisPlacement*> cut;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kReplicate) {
      continue;
    }
    if (entry.placement.kind != PlacementKind::kShard) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                     tensor.name,
                                                     ": axis ",
                                                     entry.axis,
                                                     ": ",
                                                     PlacementText(entry.placement),
                                                     " has no DTensor placement"));
    }
    int64_t factor = 1;
    for (const AxisPlacement* before : cut) {
      if (before->placement.dim == entry.placement.dim &&
          mesh.AxisIndex(before->axis) > mesh.AxisIndex(entry.axis)) {
        factor *= mesh.AxisSize(before->axis);
      }
    }
    At(foreign, mesh.AxisIndex(entry.axis)) = {
        factor == 1 ? ForeignKind::kShard : ForeignKind::kStridedShard,
        entry.placement.dim,
        factor};
    cut.push_back(&entry);
  }
  return foreign;
}

}  // namespace ravel::plan
