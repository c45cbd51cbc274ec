#pragma once

// Describes where a buffer's elements are: an ordered list of (axis, placement), the order in which
// the tensor was cut. The only vocabulary of placement; nothing here knows a strategy.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/plan/layout/mesh.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::plan {

enum class PlacementKind {
  kReplicate,     // every rank of the axis holds the same
  kPartial,       // an unreduced addend: gradients only
  kShard,         // a chunk of dimension `dim`
  kFlat,          // an interval of the group's flat buffer, cut between rows
  kBlockAtomic,   // Flat, cut between blocks of `block_rows` rows
  kTensorAtomic,  // Flat, whole tensors with an owner each
};

struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  int dim = 0;             // kShard
  int64_t block_rows = 0;  // kBlockAtomic

  static constexpr Placement Replicate() { return {}; }
  static constexpr Placement Partial() { return {PlacementKind::kPartial, 0, 0}; }
  static constexpr Placement Shard(int dim) { return {PlacementKind::kShard, dim, 0}; }
  static constexpr Placement Flat() { return {PlacementKind::kFlat, 0, 0}; }
  static constexpr Placement BlockAtomic(int64_t rows) {
    return {PlacementKind::kBlockAtomic, 0, rows};
  }
  static constexpr Placement TensorAtomic() { return {PlacementKind::kTensorAtomic, 0, 0}; }

  // Flat, BlockAtomic or TensorAtomic.
  constexpr bool in_flat_family() const {
    return kind == PlacementKind::kFlat || kind == PlacementKind::kBlockAtomic ||
           kind == PlacementKind::kTensorAtomic;
  }
  bool operator==(const Placement&) const = default;
};
// "Shard(0)"
std::string PlacementText(const Placement& placement);

struct AxisPlacement {
  std::string axis;
  Placement placement;
  bool operator==(const AxisPlacement&) const = default;
};
// Shard entries first, then the Flat family, inner axis first, then Partial. An axis that is not
// listed is Replicate.
using Placements = std::vector<AxisPlacement>;
// "[tensor Shard(0), shard Flat]"
std::string PlacementsText(const Placements& placements);
Placement PlacementOn(const Placements& placements, std::string_view axis);
// The same placements as other code compares them: no Replicate entries; Partial last, inner first.
Placements Canonical(const Placements& placements, const Mesh& mesh);

// The tensor that placements are checked against, with the name that errors use.
struct PlacedTensor {
  std::string name;
  Shape shape;  // global
};
enum class BufferUse { kValues, kGradient };  // only a gradient may be Partial

// Refuses what no buffer can be: an unknown or repeated axis; a dimension that the tensor lacks;
// Shard after the Flat family; Flat axes not inner first; an atom coarser than that of the axis
// inside it; TensorAtomic beside another Flat axis; Partial values; an uneven cut of a dimension
// other than 0 below Flat (its rows would differ in length from rank to rank). Errors name the
// tensor and the axis.
absl::Status ValidatePlacements(const PlacedTensor& tensor,
                                const Mesh& mesh,
                                const Placements& placements,
                                BufferUse use);

// The axes whose ranks hold different parts of the tensor, in the order of `placements`; Partial
// and Replicate axes are none. What is said of a whole tensor of values, such as the amax that a
// scale is made of, is combined over exactly these: values are never Partial, and ranks that differ
// on the other axes hold copies.
std::vector<std::string> CutAxes(const Placements& placements);
// Ranks that share the tensor under `placements`: each holds 1/CutCount of it.
int64_t CutCount(const Placements& placements, const Mesh& mesh);

// Elements [begin, end) of a buffer or a tensor.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

}  // namespace ravel::plan
