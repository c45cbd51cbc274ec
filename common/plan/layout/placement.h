#pragma once

// Describes where a buffer's elements are: an ordered list of (axis, placement), the order in which
// the tensor was cut. The only vocabulary of placement; nothing here knows a strategy.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/dimension_cut.h"
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
  // kShard: parts of the dimension that are cut each by itself, elements of it that a rank has, and
  // ranks that follow each other and have the same (DimensionCut, which says more).
  std::array<int64_t, 4> parts = {};
  int64_t chunk = 0;
  int64_t copies = 1;

  static constexpr Placement Replicate() { return {}; }
  static constexpr Placement Partial() { return {.kind = PlacementKind::kPartial}; }
  static constexpr Placement Shard(int dim) { return {.kind = PlacementKind::kShard, .dim = dim}; }
  static constexpr Placement Flat() { return {.kind = PlacementKind::kFlat}; }
  static constexpr Placement BlockAtomic(int64_t rows) {
    return {.kind = PlacementKind::kBlockAtomic, .block_rows = rows};
  }
  static constexpr Placement TensorAtomic() { return {.kind = PlacementKind::kTensorAtomic}; }
  // Replicate where nothing is cut.
  static constexpr Placement Of(const DimensionCut& cut) {
    return cut.cuts() ? Placement{.kind = PlacementKind::kShard,
                                  .dim = cut.dim,
                                  .parts = cut.parts,
                                  .chunk = cut.chunk,
                                  .copies = cut.copies}
                      : Placement();
  }

  // Flat, BlockAtomic or TensorAtomic.
  constexpr bool in_flat_family() const {
    return kind == PlacementKind::kFlat || kind == PlacementKind::kBlockAtomic ||
           kind == PlacementKind::kTensorAtomic;
  }
  bool operator==(const Placement&) const = default;
};
// "Shard(0)", "Shard(1 of 768|768|768)", "Shard(0 by 25136)", "Shard(0, 2 copies)"
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
// kActivation: of one step of a unit, [tokens, features]. Only gradients and activations may be
// Partial.
enum class BufferUse { kValues, kGradient, kActivation };

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
