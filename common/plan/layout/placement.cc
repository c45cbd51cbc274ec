// Checks placement lists and compares them. Entries are ordered as cuts happen: Shard (dimensions),
// then Flat (the buffer, inner axis first), then Partial. The checks refuse lists that no buffer
// can have, for example an outer Flat cut with coarser atoms than the inner one, whose boundaries
// it shares. Canonical form drops Replicate entries, so equal placements compare equal.

#include "common/plan/layout/placement.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

absl::Status PlacementError(const PlacedTensor& tensor,
                            const std::string& axis,
                            const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", tensor.name, ": axis ", axis, ": ", what));
}

std::string ShardText(const Placement& cut) {
  std::string text = absl::StrCat("Shard(", cut.dim);
  for (size_t i = 0; i < cut.parts.size() && cut.parts[i] > 0; ++i) {
    absl::StrAppend(&text, i == 0 ? " of " : "|", cut.parts[i]);
  }
  if (cut.chunk > 0) {
    absl::StrAppend(&text, " by ", cut.chunk);
  }
  if (cut.copies > 1) {
    absl::StrAppend(&text, ", ", cut.copies, " copies");
  }
  return text + ")";
}

// Rows that an atom has, for comparing: a boundary of a coarser atom is one of any finer atom.
bool CutsWithin(const Placement& finer, const Placement& coarser) {
  const int64_t rows = std::max<int64_t>(finer.block_rows, 1);
  return std::max<int64_t>(coarser.block_rows, 1) % rows == 0;
}

// Shard entries: dimensions exist; remembers what is left of each to see whether cuts are even.
absl::Status CheckShardEntry(const PlacedTensor& tensor,
                             const Mesh& mesh,
                             const AxisPlacement& entry,
                             Shape* left,
                             std::string* uneven_axis) {
  const int dim = entry.placement.dim;
  if (dim < 0 || dim >= std::ssize(tensor.shape)) {
    return PlacementError(tensor,
                          entry.axis,
                          absl::StrCat(PlacementText(entry.placement),
                                       ": the tensor has ",
                                       tensor.shape.size(),
                                       " dimensions"));
  }
  int64_t& length = At(*left, dim);
  const int64_t size = mesh.AxisSize(entry.axis);
  const Placement& cut = entry.placement;
  if (cut.copies < 1 || size % cut.copies != 0 || cut.chunk < 0) {
    return PlacementError(
        tensor, entry.axis, absl::StrCat(PlacementText(cut), " on ", size, " ranks"));
  }
  const int64_t pieces = size / cut.copies;
  if (cut.chunk > 0 && cut.chunk * pieces < length) {
    return PlacementError(
        tensor, entry.axis, absl::StrCat(PlacementText(cut), " leaves some of ", length));
  }
  const int64_t sum = std::accumulate(cut.parts.begin(), cut.parts.end(), int64_t{0});
  if (sum > 0 && (sum != length || cut.chunk > 0)) {
    return PlacementError(
        tensor, entry.axis, absl::StrCat(PlacementText(cut), " of a dimension of ", length));
  }
  const bool even = std::all_of(
      cut.parts.begin(), cut.parts.end(), [&](int64_t part) { return part % pieces == 0; });
  if ((dim != 0 || sum > 0) && (length % pieces != 0 || !even || cut.chunk > 0) &&
      uneven_axis->empty()) {
    *uneven_axis = entry.axis;
  }
  length = cut.chunk > 0 ? std::min(length, cut.chunk) : DivCeil(length, pieces);
  return absl::OkStatus();
}

absl::Status CheckFlatEntry(const PlacedTensor& tensor,
                            const Mesh& mesh,
                            const AxisPlacement& entry,
                            const AxisPlacement* inner) {
  const Placement& placement = entry.placement;
  if (placement.kind == PlacementKind::kBlockAtomic && placement.block_rows < 1) {
    return PlacementError(
        tensor, entry.axis, absl::StrCat(PlacementText(placement), ": expected at least 1 row"));
  }
  if (inner == nullptr) {
    return absl::OkStatus();
  }
  if (mesh.AxisIndex(entry.axis) > mesh.AxisIndex(inner->axis)) {
    return PlacementError(tensor,
                          entry.axis,
                          absl::StrCat(PlacementText(placement),
                                       " must come before that of axis ",
                                       inner->axis,
                                       ", which is further out: inner axis first"));
  }
  if (placement.kind == PlacementKind::kTensorAtomic ||
      inner->placement.kind == PlacementKind::kTensorAtomic) {
    return PlacementError(tensor,
                          entry.axis,
                          absl::StrCat(PlacementText(placement),
                                       " beside ",
                                       PlacementText(inner->placement),
                                       " on axis ",
                                       inner->axis,
                                       ": TensorAtomic allows no other Flat axis"));
  }
  if (!CutsWithin(placement, inner->placement)) {
    return PlacementError(tensor,
                          entry.axis,
                          absl::StrCat(PlacementText(placement),
                                       " is not a divisor of ",
                                       PlacementText(inner->placement),
                                       " on axis ",
                                       inner->axis,
                                       ", the boundaries of which it shares"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string PlacementText(const Placement& placement) {
  switch (placement.kind) {
    case PlacementKind::kReplicate:
      return "Replicate";
    case PlacementKind::kPartial:
      return "Partial";
    case PlacementKind::kShard:
      return ShardText(placement);
    case PlacementKind::kFlat:
      return "Flat";
    case PlacementKind::kBlockAtomic:
      return absl::StrCat("BlockAtomic(", placement.block_rows, ")");
    case PlacementKind::kTensorAtomic:
      return "TensorAtomic";
  }
  return "?";
}

std::string PlacementsText(const Placements& placements) {
  std::string text = "[";
  for (const AxisPlacement& entry : placements) {
    absl::StrAppend(
        &text, text.size() > 1 ? ", " : "", entry.axis, " ", PlacementText(entry.placement));
  }
  return text + "]";
}

Placement PlacementOn(const Placements& placements, std::string_view axis) {
  for (const AxisPlacement& entry : placements) {
    if (entry.axis == axis) {
      return entry.placement;
    }
  }
  return Placement::Replicate();
}

Placements Canonical(const Placements& placements, const Mesh& mesh) {
  Placements canonical;
  Placements partial;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kPartial) {
      partial.push_back(entry);
    } else if (entry.placement.kind != PlacementKind::kReplicate) {
      canonical.push_back(entry);
    }
  }
  std::sort(partial.begin(), partial.end(), [&](const AxisPlacement& a, const AxisPlacement& b) {
    return mesh.AxisIndex(a.axis) > mesh.AxisIndex(b.axis);
  });
  canonical.insert(canonical.end(), partial.begin(), partial.end());
  return canonical;
}

absl::Status ValidatePlacements(const PlacedTensor& tensor,
                                const Mesh& mesh,
                                const Placements& placements,
                                BufferUse use) {
  std::set<std::string> seen;
  Shape left = tensor.shape;
  std::string uneven_axis;
  const AxisPlacement* inner = nullptr;
  for (const AxisPlacement& entry : placements) {
    if (mesh.AxisIndex(entry.axis) < 0) {
      return PlacementError(tensor, entry.axis, absl::StrCat("the mesh is ", mesh.Text()));
    }
    if (!seen.insert(entry.axis).second) {
      return PlacementError(tensor, entry.axis, "has two placements");
    }
    if (entry.placement.kind == PlacementKind::kPartial && use == BufferUse::kValues) {
      return PlacementError(tensor, entry.axis, "Partial is for gradients only");
    }
    if (entry.placement.kind == PlacementKind::kShard) {
      if (inner != nullptr) {
        return PlacementError(tensor,
                              entry.axis,
                              absl::StrCat(PlacementText(entry.placement),
                                           " must come before ",
                                           PlacementText(inner->placement),
                                           " on axis ",
                                           inner->axis));
      }
      RETURN_IF_ERROR(CheckShardEntry(tensor, mesh, entry, &left, &uneven_axis));
    }
    if (entry.placement.in_flat_family()) {
      RETURN_IF_ERROR(CheckFlatEntry(tensor, mesh, entry, inner));
      inner = &entry;
    }
  }
  if (inner != nullptr && !uneven_axis.empty()) {
    return PlacementError(
        tensor,
        uneven_axis,
        absl::StrCat(PlacementText(PlacementOn(placements, uneven_axis)),
                     " of shape ",
                     ShapeText(tensor.shape),
                     " over ",
                     mesh.AxisSize(uneven_axis),
                     " ranks is uneven; below Flat, dimensions other than 0 must divide evenly"));
  }
  return absl::OkStatus();
}

std::vector<std::string> CutAxes(const Placements& placements) {
  std::vector<std::string> axes;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kShard || entry.placement.in_flat_family()) {
      axes.push_back(entry.axis);
    }
  }
  return axes;
}

int64_t CutCount(const Placements& placements, const Mesh& mesh) {
  int64_t count = 1;
  for (const std::string& axis : CutAxes(placements)) {
    count *= mesh.AxisSize(axis) / PlacementOn(placements, axis).copies;
  }
  return count;
}

}  // namespace ravel::plan
