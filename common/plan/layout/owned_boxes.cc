#include "common/plan/layout/owned_boxes.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

int64_t IndexOn(const Mesh& mesh, const Coordinate& coordinate, const AxisPlacement& entry) {
  const int axis = mesh.AxisIndex(entry.axis);
  CHECK_MSG(axis >= 0, entry.axis.c_str());
  return At(coordinate, axis);
}

const AxisPlacement* TensorAtomicEntry(const Placements& placements) {
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kTensorAtomic) {
      return &entry;
    }
  }
  return nullptr;
}

int64_t ReplicaOf(const Placements& placements, const Mesh& mesh, const Coordinate& coordinate) {
  int64_t replica = 0;
  for (size_t i = 0; i < mesh.axes().size(); ++i) {
    const MeshAxis& axis = mesh.axes()[i];
    if (PlacementOn(placements, axis.name).kind == PlacementKind::kReplicate) {
      replica = replica * axis.size + coordinate[i];
    }
  }
  return replica;
}

// `range` of an item, shifted to global coordinates.
std::vector<Box> GlobalBoxes(const Box& item, const ElementRange& range) {
  std::vector<Box> boxes = RangeToBoxes(item.length, range.begin, range.end);
  if (boxes.empty() && !item.length.empty()) {
    Box none = WholeBox(item.length);
    none.offset[0] =
        std::min(range.begin / std::max<int64_t>(RowElements(item.length), 1), item.length[0]);
    none.length[0] = 0;
    boxes.push_back(none);
  }
  for (Box& box : boxes) {
    for (size_t dim = 0; dim < item.offset.size(); ++dim) {
      box.offset[dim] += item.offset[dim];
    }
  }
  return boxes;
}

}  // namespace

ElementRange Chunk(int64_t n, int64_t k, int64_t r) {
  CHECK(n >= 0 && k > 0 && r >= 0 && r < k);
  const int64_t chunk = DivCeil(n, k);
  return {std::min(n, r * chunk), std::min(n, (r + 1) * chunk)};
}

Box ItemBox(const Shape& shape,
            const Placements& placements,
            const Mesh& mesh,
            const Coordinate& coordinate) {
  Box box = WholeBox(shape);
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kShard) {
      const size_t dim = Size(entry.placement.dim);
      CHECK_LT(dim, shape.size());
      const ElementRange part =
          Chunk(box.length[dim], mesh.AxisSize(entry.axis), IndexOn(mesh, coordinate, entry));
      box.offset[dim] += part.begin;
      box.length[dim] = part.size();
    }
  }
  return box;
}

Shape LargestItem(const Shape& shape, const Placements& placements, const Mesh& mesh) {
  return ItemBox(shape, placements, mesh, Coordinate(mesh.axes().size(), 0)).length;
}

int64_t FlatPieceCount(const Placements& placements, const Mesh& mesh) {
  int64_t count = 1;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.in_flat_family()) {
      count *= mesh.AxisSize(entry.axis);
    }
  }
  return count;
}

int64_t FlatPieceIndex(const Placements& placements,
                       const Mesh& mesh,
                       const Coordinate& coordinate) {
  int64_t index = 0;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.in_flat_family()) {
      index = index * mesh.AxisSize(entry.axis) + IndexOn(mesh, coordinate, entry);
    }
  }
  return index;
}

ElementRange FlatInterval(int64_t total_elements,
                          const Placements& placements,
                          const Mesh& mesh,
                          const Coordinate& coordinate) {
  const int64_t piece = DivExact(total_elements, FlatPieceCount(placements, mesh));
  const int64_t index = FlatPieceIndex(placements, mesh, coordinate);
  return {index * piece, (index + 1) * piece};
}

Shape OwnedTensor::LocalShape() const {
  const int64_t row = RowElements(item.length);
  if (item.length.empty() || (row > 0 && (range.begin % row != 0 || range.end % row != 0))) {
    return {range.size()};
  }
  Shape shape = item.length;
  if (row > 0) {
    shape[0] = range.size() / row;
  }
  return shape;
}

OwnedTensor OwnedBoxes(const BoxQuery& query, const Coordinate& coordinate) {
  CHECK_EQ(coordinate.size(), query.mesh.axes().size());
  OwnedTensor owned;
  owned.item = ItemBox(query.shape, query.placements, query.mesh, coordinate);
  owned.replica = ReplicaOf(query.placements, query.mesh, coordinate);
  const int64_t item_elements = ElementCount(owned.item.length);
  const FlatPlace& place = query.place;
  const AxisPlacement* atomic = TensorAtomicEntry(query.placements);
  if (atomic != nullptr) {
    CHECK_MSG(place.owner >= 0, "TensorAtomic: the tensor has no owner");
    const bool mine = IndexOn(query.mesh, coordinate, *atomic) == place.owner;
    owned.range = {0, mine ? item_elements : 0};
    owned.buffer_begin = mine ? place.offset : 0;
  } else if (FlatPieceCount(query.placements, query.mesh) == 1) {
    owned.range = {0, item_elements};
    owned.buffer_begin = place.offset;
  } else {
    const ElementRange mine =
        FlatInterval(place.total_elements, query.placements, query.mesh, coordinate);
    CHECK_MSG(place.offset >= 0 && place.offset + item_elements <= place.total_elements,
              "the item lies outside its flat buffer");
    const int64_t begin = std::clamp(mine.begin - place.offset, int64_t{0}, item_elements);
    const int64_t end = std::clamp(mine.end - place.offset, int64_t{0}, item_elements);
    owned.range = {begin, end};
    owned.buffer_begin = begin < end ? place.offset + begin - mine.begin : 0;
  }
  owned.boxes = GlobalBoxes(owned.item, owned.range);
  return owned;
}

std::vector<BundlePiece> SplitBundle(const std::vector<int64_t>& part_elements,
                                     int64_t item_elements,
                                     const ElementRange& owned) {
  CHECK(0 <= owned.begin && owned.begin <= owned.end && owned.end <= item_elements);
  std::vector<BundlePiece> pieces;
  int64_t part_begin = 0;
  for (const int64_t elements : part_elements) {
    const int64_t part_end = part_begin + elements;
    const int64_t begin = std::max(owned.begin, part_begin);
    const int64_t end = std::min(owned.end, part_end);
    if (begin < end) {
      pieces.push_back({{begin - part_begin, end - part_begin}, begin - owned.begin});
    } else {
      pieces.push_back({});
    }
    part_begin = part_end;
  }
  CHECK_MSG(part_begin == item_elements, "the parts of a bundle are its item");
  return pieces;
}

}  // namespace ravel::plan
