#pragma once

// The scales of a group's fp8 optimizer states: how many a rank has, and where they lie.

#include <cstdint>
#include <span>
#include <vector>

#include "common/model/model_inventory.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/owned_boxes.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/layout/placement.h"

namespace ravel::plan {

// The scales of a piece as a piece of the tensor of scales (ScaleShape), at offset 0. `shape`: the
// tensor's.
OwnedPiece ScalesOf(const Shape& shape, const OwnedPiece& piece);

// The most that any rank has: buffers are equal on all. `stored`: the placements of what ranks
// update.
int64_t MostStateScales(const ModelInventory& inventory,
                        const GroupLayout& group,
                        const Mesh& mesh,
                        const Placements& stored);

// The scales of each of `pieces` as a piece of the tensor of scales (ScaleShape), whose offsets
// count from the start of the rank's scales. Those follow each other in the order of `stored`, all
// pieces that the rank updates of a group; each of `pieces` lies inside one of them.
std::vector<OwnedPiece> ScalePieces(const ModelInventory& inventory,
                                    std::span<const OwnedPiece> stored,
                                    std::span<const OwnedPiece> pieces);

}  // namespace ravel::plan
