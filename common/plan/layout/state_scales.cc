#include "common/plan/layout/state_scales.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/model/state_groups.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

int64_t ScalesOf(const ModelInventory& inventory, const OwnedPiece& piece) {
  const Shape& shape = inventory.tensors[piece.tensor].shape;
  CHECK_MSG(piece.item == WholeBox(shape), "scales of a tensor that is cut along a dimension");
  return StateGroups(shape, piece.range.begin, piece.range.end);
}

}  // namespace

int64_t MostStateScales(const ModelInventory& inventory,
                        const GroupLayout& group,
                        const Mesh& mesh,
                        const Placements& stored) {
  const int64_t parts = FlatPieceCount(stored, mesh);
  const int64_t length = group.layout.total_elements() / parts;
  std::vector<int64_t> scales(Size(parts), 0);
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const Shape& shape = inventory.tensors[group.tensors[i]].shape;
    const int64_t first = group.tensor_offsets[i];
    const int64_t elements = ElementCount(shape);
    for (int64_t part = first / length; part < parts && part * length < first + elements; ++part) {
      const int64_t begin = std::max<int64_t>(0, part * length - first);
      const int64_t end = std::min(elements, (part + 1) * length - first);
      scales[Size(part)] += StateGroups(shape, begin, end);
    }
  }
  return *std::max_element(scales.begin(), scales.end());
}

std::vector<OwnedPiece> ScalePieces(const ModelInventory& inventory,
                                    std::span<const OwnedPiece> stored,
                                    std::span<const OwnedPiece> pieces) {
  std::vector<OwnedPiece> scales;
  for (const OwnedPiece& piece : pieces) {
    int64_t offset = 0;
    auto around = stored.begin();
    while (around != stored.end() &&
           !(around->tensor == piece.tensor && around->range.begin <= piece.range.begin &&
             piece.range.end <= around->range.end)) {
      offset += ScalesOf(inventory, *around++);
    }
    CHECK_MSG(around != stored.end(), "a piece of what the rank does not update");
    const Shape& shape = inventory.tensors[piece.tensor].shape;
    const int64_t before = StateGroups(shape, 0, piece.range.begin);
    scales.push_back(
        {.tensor = piece.tensor,
         .item = WholeBox(ScaleShape(shape)),
         .range = {before, before + ScalesOf(inventory, piece)},
         .shard_offset = offset + StateGroups(shape, around->range.begin, piece.range.begin)});
  }
  return scales;
}

}  // namespace ravel::plan
