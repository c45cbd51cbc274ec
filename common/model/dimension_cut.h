#pragma once

// Cuts of one tensor by the `tensor` axis of a mesh.

#include <array>
#include <cstdint>

namespace ravel::plan {

// Nothing is cut where it has one rank.
struct DimensionCut {
  int dim = -1;       // that is cut; -1: each rank has all
  int64_t ranks = 1;  // T
  // Lengths of up to four parts of the dimension, one after another, each of which is cut by
  // itself: q|k|v of one matrix. Zeros: one part. In a buffer the rank's share of the first part
  // comes before that of the second: each is a matrix of its own.
  std::array<int64_t, 4> parts = {};
  // Elements of the dimension on a rank; the last ranks have less or nothing. 0: Chunk, which is
  // even but for a rest. Vocabularies are cut in P blocks of rows, of which a rank has P / T.
  int64_t chunk = 0;
  // Heads along the dimension: a head is never cut. 0: any element may be a border.
  int64_t heads = 0;
  // Ranks that follow each other and have the same: of heads that are fewer than T.
  int64_t copies = 1;
  // Ranks with the same elements make addends of their gradient. False: they make the same.
  bool partial_gradient = false;
  bool operator==(const DimensionCut&) const = default;

  constexpr bool cuts() const { return dim >= 0 && ranks > 1; }
  // Ranks that have different parts.
  constexpr int64_t pieces() const { return cuts() ? ranks / copies : 1; }
};

}  // namespace ravel::plan
