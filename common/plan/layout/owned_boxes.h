#pragma once

// Which elements of which tensor a rank owns, for every placement: pure, 64-bit, no collectives,
// and never a look at an object at hand. Global shapes and placements in, global rectangles out.

#include <cstdint>
#include <functional>
#include <vector>

#include "common/model/ids.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/placement.h"
#include "common/shape.h"

namespace ravel::plan {

// Part r of n things in k chunks of ceil(n/k): trailing chunks may be short or empty.
ElementRange Chunk(int64_t n, int64_t k, int64_t r);

// Step 1: the *item* of a coordinate, which is the tensor after its Shard entries in list order and
// before Flat. Its length is what everything below counts in. A Shard entry may have parts; the
// item is then several boxes, one of each part, which follow each other in a buffer.
std::vector<Box> ItemBoxes(const Shape& shape,
                           const Placements& placements,
                           const Mesh& mesh,
                           const Coordinate& coordinate);
// The box of an item whose placements have no parts.
Box ItemBox(const Shape& shape,
            const Placements& placements,
            const Mesh& mesh,
            const Coordinate& coordinate);

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

// The place of a tensor's item in the flat buffer of its group, from a FlatLayout.
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
  TensorId tensor = {};  // what to call it
};

// A stretch of a tensor's elements that lie one after another in the tensor and in a buffer.
struct OwnedRun {
  int64_t first = 0;   // row-major index in the tensor
  int64_t offset = 0;  // elements from the start of the buffer
  int64_t elements = 0;
};

// The part of one tensor that one rank has: row-major elements `range` of `item`, a box of the
// tensor, which lie in this order in one of the rank's buffers. Everything that reads, writes,
// draws, measures, saves or sums up a part of a tensor takes this value. A rank that has nothing
// has one, too.
struct OwnedPiece {
  TensorId tensor = {};
  Box item;                  // in global coordinates; empty when Shard left nothing
  ElementRange range;        // of the item's elements
  int64_t shard_offset = 0;  // of the first, in elements from the start of the buffer

  int64_t elements() const { return range.size(); }
  // The range as boxes in global coordinates, in order: one when it begins and ends with a row, at
  // most 2 * dims - 1; none when it is empty.
  std::vector<Box> Boxes() const;
  // The range as runs, in order. `shape` is the tensor's. One run where the item spans all
  // dimensions but the first; a run per row where it does not.
  void VisitRuns(const Shape& shape, const std::function<void(const OwnedRun&)>& visit) const;
  // Row-major index in the tensor of the piece's element `at`.
  int64_t IndexOf(const Shape& shape, int64_t at) const;
  bool operator==(const OwnedPiece&) const = default;
};
// All of a tensor.
OwnedPiece WholePiece(TensorId tensor, const Shape& shape, int64_t shard_offset = 0);

// The placements are valid for the shape. Partial counts as held whole: an addend has no owner, so
// nothing may be written from it. The offset counts from the start of the coordinate's interval.
OwnedPiece OwnedBoxes(const BoxQuery& query, const Coordinate& coordinate);
// The same of placements that may have parts: a piece of each, in buffer order.
std::vector<OwnedPiece> OwnedParts(const BoxQuery& query, const Coordinate& coordinate);

// A coordinate among those that own the same: mixed radix over the Replicate axes and the copies of
// Shard entries. Replica 0 writes checkpoints and counts in statistics.
int64_t ReplicaOf(const Placements& placements, const Mesh& mesh, const Coordinate& coordinate);

}  // namespace ravel::plan
