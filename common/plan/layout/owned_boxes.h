#pragma once

// Which elements of which tensor a rank owns, for every placement: pure, 64-bit, no collectives,
// and never a look at an object at hand. Global shapes and placements in, global rectangles out.

#include <cstdint>
#include <vector>

#include "common/plan/layout/mesh.h"
#include "common/plan/layout/placement.h"
#include "common/shape.h"

namespace ravel::plan {

// Part r of n things in k chunks of ceil(n/k): trailing chunks may be short or empty.
ElementRange Chunk(int64_t n, int64_t k, int64_t r);

// Step 1: the *item* of a coordinate, which is the tensor after its Shard entries in list order and
// before Flat. Its length is what everything below counts in.
Box ItemBox(const Shape& shape,
            const Placements& placements,
            const Mesh& mesh,
            const Coordinate& coordinate);
// Shape of the largest item of any coordinate, which is that of coordinate 0: what a layout that
// all ranks share is planned with.
Shape LargestItem(const Shape& shape, const Placements& placements, const Mesh& mesh);

// Step 2: pieces that the Flat axes cut a buffer into, and the place of a coordinate among them.
// Inner-major: (inner i of N, outer o of O) is place i * O + o, whatever the mesh order.
int64_t FlatPieceCount(const Placements& placements, const Mesh& mesh);
int64_t FlatPieceIndex(const Placements& placements, const Mesh& mesh, const Coordinate&);
// The coordinate's interval of a buffer of `total_elements`, which the pieces must divide; the
// whole buffer without Flat axes.
ElementRange FlatInterval(int64_t total_elements,
                          const Placements& placements,
                          const Mesh& mesh,
                          const Coordinate& coordinate);

// Where a tensor's item lies in the flat buffer of its group, from a FlatLayout.
struct FlatPlace {
  int64_t offset = 0;          // elements; under TensorAtomic from the start of the owner's part
  int64_t total_elements = 0;  // T; not read without Flat or BlockAtomic axes
  int64_t owner = -1;          // place on the TensorAtomic axis, from AssignTensorOwners
};

struct BoxQuery {
  const Shape& shape;  // global
  const Placements& placements;
  const Mesh& mesh;
  FlatPlace place;
};

// What one rank owns of one tensor. A rank that owns nothing has one too: empty is a value.
struct OwnedTensor {
  Box item;                  // in global coordinates; empty when Shard left nothing
  ElementRange range;        // of the item's row-major elements
  int64_t buffer_begin = 0;  // where `range` begins in the rank's part of the flat buffer
  // The range as rectangles in global coordinates, in order: one when it begins and ends with a
  // row, at most 2 * dims - 1. An empty range is one box of length (0, rest of the item...); only a
  // scalar, which has no empty box, has none.
  std::vector<Box> boxes;
  // Among the ranks that own the same: mixed radix over the Replicate axes. Replica 0 writes
  // checkpoints and counts in statistics.
  int64_t replica = 0;

  int64_t elements() const { return range.size(); }
  // Of the local tensor: (rows, rest of the *item*...) for whole rows, or the element count.
  Shape LocalShape() const;
};

// The placements are valid for the shape. Partial counts as held whole: an addend has no owner, so
// nothing may be written from it.
OwnedTensor OwnedBoxes(const BoxQuery& query, const Coordinate& coordinate);

// One part of a bundle on one rank.
struct BundlePiece {
  ElementRange in_part;     // of the part's own elements; empty when the rank has none of it
  int64_t local_begin = 0;  // from the start of the rank's range of the item
  bool operator==(const BundlePiece&) const = default;
};

// A bundle's parts lie one after another in its item. `owned` is the rank's range in *item*
// coordinates and `part_elements` the parts' full sizes in the item, never local counts; they must
// add up to `item_elements`. One piece per part. The same for weights and every optimizer state,
// and whether or not the item is replicated over `tensor`.
std::vector<BundlePiece> SplitBundle(const std::vector<int64_t>& part_elements,
                                     int64_t item_elements,
                                     const ElementRange& owned);

}  // namespace ravel::plan
