#pragma once

// The one place that knows PyTorch's _StridedShard: placements as DTensor writes them, one per mesh
// axis, to and from the ordered cuts of common/plan/layout/placement.h. A dimension that `tensor`
// cut before `shard`, which lies left of it in the mesh, is Shard on `tensor` and strided on
// `shard`.

#include <cstdint>
#include <vector>

#include "common/plan/layout/mesh.h"
#include "common/plan/layout/placement.h"
#include "common/status.h"

namespace ravel::plan {

enum class ForeignKind { kReplicate, kShard, kStridedShard };

struct ForeignPlacement {
  ForeignKind kind = ForeignKind::kReplicate;
  int dim = 0;
  // kStridedShard: pieces that axes to the right had cut the dimension into before this one did.
  int64_t split_factor = 1;
  bool operator==(const ForeignPlacement&) const = default;
};

// The cuts in the order in which they were made. From left to right, a plain Shard enters at once;
// a strided one waits until the Shard axes on its right and on its dimension that have entered
// multiply to its split factor. Refused, with tensor and axis: a factor that no such product
// matches; a dimension that is not there; a list that is not one per axis; and, on dimensions other
// than 0, uneven cuts by a strided placement or by the data axes.
absl::StatusOr<Placements> RecoverCutOrder(const PlacedTensor& tensor,
                                           const Mesh& mesh,
                                           const std::vector<ForeignPlacement>& foreign);

// The inverse, for export. Only Shard and Replicate can be written.
absl::StatusOr<std::vector<ForeignPlacement>> ForeignPlacements(const PlacedTensor& tensor,
                                                                const Mesh& mesh,
                                                                const Placements& placements);

}  // namespace ravel::plan
