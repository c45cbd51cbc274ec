#pragma once

// Moves between placements, one axis at a time: what a collective does to a buffer.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/plan/layout/mesh.h"
#include "common/plan/layout/placement.h"
#include "common/status.h"

namespace ravel::plan {

enum class MoveKind { kAllGather, kAllReduce, kReduceScatter, kAllToAll, kView, kCopy };
std::string_view MoveKindName(MoveKind kind);

// One collective, or none, on one axis.
struct Move {
  std::string axis;
  int64_t axis_size = 1;
  Placement from;
  Placement to;
  MoveKind kind = MoveKind::kView;
  Placements before;  // of the whole buffer, canonical
  Placements after;
  bool operator==(const Move&) const = default;
};

// The move of one axis, or an error that names tensor, axis, from and to. Legal: Flat -> Replicate
// all-gather; Partial -> Replicate all-reduce; Partial -> Flat reduce-scatter; Replicate -> Flat
// and Replicate -> Shard views; Flat <-> TensorAtomic all-to-all; BlockAtomic as Flat. Flat axes
// are nested: the outer one is entered last and left first. Of activations also Partial -> Shard
// reduce-scatter, and Shard -> Replicate all-gather. On an axis of size 1 a reduce is a copy and
// anything else a view.
absl::StatusOr<Move> PlanMove(const PlacedTensor& tensor,
                              const Mesh& mesh,
                              const Placements& from,
                              const AxisPlacement& to,
                              BufferUse use = BufferUse::kGradient);

// The moves from one list to another, each legal: gathers outer axis first, reduces inner axis
// first. TensorAtomic is entered and left through Flat. Empty when nothing changes.
absl::StatusOr<std::vector<Move>> PlanMoves(const PlacedTensor& tensor,
                                            const Mesh& mesh,
                                            const Placements& from,
                                            const Placements& to);

// Bytes that one rank sends for the move of a tensor of `elements`: the local elements of its
// larger side times (k-1)/k, twice that for an all-reduce; 0 for views and copies.
int64_t MoveBytes(const Move& move, const Mesh& mesh, int64_t elements, int64_t element_bytes);

}  // namespace ravel::plan
