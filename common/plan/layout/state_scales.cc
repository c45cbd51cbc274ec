#include "common/plan/layout/state_scales.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/model/state_groups.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

// Groups of a row of 128 elements begin and end where the item does, or the row.
int64_t GroupOf(int64_t column) {
  CHECK_MSG(column % kStateGroup == 0, "a cut inside a group of a state");
  return column / kStateGroup;
}

// The scales of an item.
Box ScaleBox(const Shape& shape, const Box& item) {
  const Box whole = WholeBox(shape);
  if (shape.size() == 1) {
    return {.offset = {GroupOf(item.offset[0])}, .length = {DivCeil(item.length[0], kStateGroup)}};
  }
  Box scales = WholeBox(ScaleShape(shape));
  scales.offset[0] = item.offset[0];
  scales.length[0] = item.length[0];
  if (RowElements(item.length) != RowElements(whole.length)) {
    CHECK_MSG(shape.size() == 2, "scales of a tensor that is cut along an inner dimension");
    scales.offset[1] = GroupOf(item.offset[1]);
    scales.length[1] = DivCeil(item.length[1], kStateGroup);
  }
  return scales;
}

int64_t CountOf(const OwnedPiece& piece) {
  return StateGroups(piece.item.length, piece.range.begin, piece.range.end);
}

}  // namespace

OwnedPiece ScalesOf(const Shape& shape, const OwnedPiece& piece) {
  const int64_t before = StateGroups(piece.item.length, 0, piece.range.begin);
  return {.tensor = piece.tensor,
          .item = ScaleBox(shape, piece.item),
          .range = {before, before + CountOf(piece)},
          .shard_offset = 0};
}

int64_t MostStateScales(const ModelInventory& inventory,
                        const GroupLayout& group,
                        const Mesh& mesh,
                        const Placements& stored) {
  const int64_t parts = FlatPieceCount(stored, mesh);
  const int64_t length = group.layout.total_elements() / parts;
  const Coordinate first_rank(mesh.axes().size(), 0);  // no rank has a larger item
  std::vector<int64_t> scales(Size(parts), 0);
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const TensorSpec& tensor = inventory.tensors[group.tensors[i]];
    Placements cut;
    if (tensor.cut.cuts() && mesh.AxisIndex(kTensorAxis) >= 0) {
      cut.push_back({kTensorAxis, Placement::Of(tensor.cut)});
    }
    int64_t first = group.tensor_offsets[i];
    for (const Box& item : ItemBoxes(tensor.shape, cut, mesh, first_rank)) {
      const int64_t elements = ElementCount(item.length);
      for (int64_t part = first / length; part < parts && part * length < first + elements;
           ++part) {
        const int64_t begin = std::max<int64_t>(0, part * length - first);
        const int64_t end = std::min(elements, (part + 1) * length - first);
        scales[Size(part)] += StateGroups(item.length, begin, end);
      }
      first += elements;
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
           !(around->tensor == piece.tensor && around->item == piece.item &&
             around->range.begin <= piece.range.begin && piece.range.end <= around->range.end)) {
      offset += CountOf(*around++);
    }
    CHECK_MSG(around != stored.end(), "a piece of what the rank does not update");
    scales.push_back(ScalesOf(inventory.tensors[piece.tensor].shape, piece));
    scales.back().shard_offset =
        offset + StateGroups(piece.item.length, around->range.begin, piece.range.begin);
  }
  return scales;
}

}  // namespace ravel::plan
