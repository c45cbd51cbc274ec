// From placements to the elements that a rank owns, in two steps: Shard entries cut the tensor's
// dimensions and leave a box (the item); Flat entries then cut the flat buffer in which the item
// lies, and leave a range of the item's row-major elements. Partial entries change values, not
// places, and are ignored. Any part of a tensor is thus (box, range), which loading, saving,
// initialisation and norms all take.

#include "common/plan/layout/owned_boxes.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/check.h"
#include "common/ckpt/box_runs.h"
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

// `item` is a box of the coordinate's item, which lies at `place`.
OwnedPiece OwnedPart(const BoxQuery& query,
                     const FlatPlace& place,
                     Box item,
                     const Coordinate& coordinate) {
  OwnedPiece owned = {
      .tensor = query.tensor, .item = std::move(item), .range = {}, .shard_offset = 0};
  const int64_t item_elements = ElementCount(owned.item.length);
  const AxisPlacement* atomic = TensorAtomicEntry(query.placements);
  if (atomic != nullptr) {
    CHECK_MSG(place.owner >= 0, "TensorAtomic: the tensor has no owner");
    const bool mine = IndexOn(query.mesh, coordinate, *atomic) == place.owner;
    owned.range = {0, mine ? item_elements : 0};
    owned.shard_offset = mine ? place.offset : 0;
    return owned;
  }
  if (FlatPieceCount(query.placements, query.mesh) == 1) {
    owned.range = {0, item_elements};
    owned.shard_offset = place.offset;
    return owned;
  }
  const ElementRange mine =
      FlatInterval(place.total_elements, query.placements, query.mesh, coordinate);
  CHECK_MSG(place.offset >= 0 && place.offset + item_elements <= place.total_elements,
            "the item lies outside its flat buffer");
  const int64_t begin = std::clamp(mine.begin - place.offset, int64_t{0}, item_elements);
  const int64_t end = std::clamp(mine.end - place.offset, int64_t{0}, item_elements);
  owned.range = {begin, end};
  owned.shard_offset = begin < end ? place.offset + begin - mine.begin : 0;
  return owned;
}

// Rank r of k has one range of each part. Only the first entry of a list has parts: after it
// nothing of a part's place in the dimension is known.
std::vector<Box> CutBoxes(const std::vector<Box>& boxes,
                          const Placement& cut,
                          int64_t k,
                          int64_t r) {
  const size_t dim = Size(cut.dim);
  const int64_t pieces = DivExact(k, cut.copies);
  const int64_t index = r / cut.copies;
  std::vector<Box> made;
  const auto add = [&](const Box& box, int64_t begin, int64_t length) {
    const ElementRange range = cut.chunk > 0
                                   ? ElementRange{std::min(length, index * cut.chunk),
                                                  std::min(length, (index + 1) * cut.chunk)}
                                   : Chunk(length, pieces, index);
    made.push_back(box);
    made.back().offset[dim] += begin + range.begin;
    made.back().length[dim] = range.size();
  };
  if (cut.parts[0] == 0) {
    for (const Box& box : boxes) {
      add(box, 0, box.length[dim]);
    }
    return made;
  }
  CHECK_MSG(boxes.size() == 1, "two lists of parts");
  int64_t begin = 0;
  for (const int64_t part : cut.parts) {
    if (part > 0) {
      add(boxes.front(), begin, part);
    }
    begin += part;
  }
  return made;
}

}  // namespace

ElementRange Chunk(int64_t n, int64_t k, int64_t r) {
  CHECK(n >= 0 && k > 0 && r >= 0 && r < k);
  const int64_t chunk = DivCeil(n, k);
  return {std::min(n, r * chunk), std::min(n, (r + 1) * chunk)};
}

std::vector<Box> ItemBoxes(const Shape& shape,
                           const Placements& placements,
                           const Mesh& mesh,
                           const Coordinate& coordinate) {
  std::vector<Box> boxes = {WholeBox(shape)};
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kShard) {
      CHECK_LT(Size(entry.placement.dim), shape.size());
      boxes = CutBoxes(
          boxes, entry.placement, mesh.AxisSize(entry.axis), IndexOn(mesh, coordinate, entry));
    }
  }
  return boxes;
}

Box ItemBox(const Shape& shape,
            const Placements& placements,
            const Mesh& mesh,
            const Coordinate& coordinate) {
  std::vector<Box> boxes = ItemBoxes(shape, placements, mesh, coordinate);
  CHECK_EQ(boxes.size(), 1u);
  return std::move(boxes.front());
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

std::vector<Box> OwnedPiece::Boxes() const {
  return ckpt::BoxesOfRange(item, range.begin, range.end);
}

void OwnedPiece::VisitRuns(const Shape& shape,
                           const std::function<void(const OwnedRun&)>& visit) const {
  ckpt::VisitBoxRuns(shape, item, range.begin, range.end, [&](const ckpt::BoxRun& run) {
    visit({.first = run.tensor_begin,
           .offset = shard_offset + run.box_begin - range.begin,
           .elements = run.elements});
  });
}

int64_t OwnedPiece::IndexOf(const Shape& shape, int64_t at) const {
  CHECK(at >= 0 && at < elements());
  return ckpt::TensorIndex(shape, item, range.begin + at);
}

OwnedPiece WholePiece(TensorId tensor, const Shape& shape, int64_t shard_offset) {
  return {.tensor = tensor,
          .item = WholeBox(shape),
          .range = {0, ElementCount(shape)},
          .shard_offset = shard_offset};
}

OwnedPiece OwnedBoxes(const BoxQuery& query, const Coordinate& coordinate) {
  std::vector<OwnedPiece> parts = OwnedParts(query, coordinate);
  CHECK_EQ(parts.size(), 1u);
  return std::move(parts.front());
}

std::vector<OwnedPiece> OwnedParts(const BoxQuery& query, const Coordinate& coordinate) {
  CHECK_EQ(coordinate.size(), query.mesh.axes().size());
  std::vector<OwnedPiece> parts;
  FlatPlace place = query.place;
  for (Box& item : ItemBoxes(query.shape, query.placements, query.mesh, coordinate)) {
    const int64_t elements = ElementCount(item.length);
    parts.push_back(OwnedPart(query, place, std::move(item), coordinate));
    place.offset += elements;
  }
  return parts;
}

int64_t ReplicaOf(const Placements& placements, const Mesh& mesh, const Coordinate& coordinate) {
  int64_t replica = 0;
  for (size_t i = 0; i < mesh.axes().size(); ++i) {
    const MeshAxis& axis = mesh.axes()[i];
    const Placement placement = PlacementOn(placements, axis.name);
    if (placement.kind == PlacementKind::kReplicate) {
      replica = replica * axis.size + coordinate[i];
    } else {
      replica = replica * placement.copies + coordinate[i] % placement.copies;
    }
  }
  return replica;
}

}  // namespace ravel::plan
