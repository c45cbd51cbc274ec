#pragma once

// Bytes that a rank stores and sends under each strategy, from the moves of a tensor
// and from the table's formulas; tests hold the two equal.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/layout/strategy_table.h"

namespace ravel::plan {

// Bytes per element of each buffer.
struct ElementBytes {
  int64_t weight = 2;
  int64_t gradient = 4;
  int64_t optimizer = 12;
  int64_t wire = 4;  // of a gradient on the innermost data axis; further out it is `gradient`
};
// Resident bytes of a rank for `elements` in all, without padding, windows or activations.
struct RankBytes {
  int64_t weight = 0;
  int64_t gradient = 0;
  int64_t optimizer = 0;
  int64_t total() const { return weight + gradient + optimizer; }
};
RankBytes BytesPerRank(const RolePlacements& placements,
                       const Mesh& mesh,
                       int64_t elements,
                       const ElementBytes& bytes);

// Bytes that a rank sends on each axis per step of `micro_batches`, with a gather for forward and
// one for backward; in mesh order, one entry per axis.
struct AxisTraffic {
  std::string axis;
  int64_t bytes = 0;
  bool operator==(const AxisTraffic&) const = default;
};
// From the moves that a tensor makes.
absl::StatusOr<std::vector<AxisTraffic>> PlannedTraffic(const RolePlacements& placements,
                                                        const PlacedTensor& tensor,
                                                        const Mesh& mesh,
                                                        const ElementBytes& bytes,
                                                        int64_t micro_batches);
// From the rows alone, for the data axes and a tensor that nothing else cuts. Equal to
// PlannedTraffic where element counts divide.
std::vector<AxisTraffic> TableTraffic(const StrategyChoice& choice,
                                      const Mesh& mesh,
                                      int64_t elements,
                                      const ElementBytes& bytes,
                                      int64_t micro_batches);

}  // namespace ravel::plan
