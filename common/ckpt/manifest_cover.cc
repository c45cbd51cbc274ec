#include <algorithm>
#include <optional>

#include <absl/strings/str_cat.h>

#include "common/ckpt/manifest.h"
#include "common/signed_size.h"

namespace ravel::ckpt {
namespace {

std::string BoxText(const Box& box) {
  return absl::StrCat("offset ", ShapeText(box.offset), " length ", ShapeText(box.length));
}

absl::Status CheckInBounds(const Shape& shape, const Box& box) {
  if (box.offset.size() != shape.size() || box.length.size() != shape.size()) {
    return absl::DataLossError(
        absl::StrCat("a chunk has ", box.offset.size(), " dimensions, the tensor ", shape.size()));
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const bool inside = box.offset[dim] >= 0 && box.length[dim] >= 1 &&
                        box.offset[dim] <= shape[dim] &&
                        box.length[dim] <= shape[dim] - box.offset[dim];
    if (!inside) {
      return absl::DataLossError(
          absl::StrCat("chunk ", BoxText(box), " lies outside shape ", ShapeText(shape)));
    }
  }
  return absl::OkStatus();
}

// The axis along which the boxes begin at the most places: the sweep stays short there.
size_t SweepAxis(const std::vector<Box>& boxes, size_t dimensions) {
  size_t best = 0;
  size_t most = 0;
  for (size_t dim = 0; dim < dimensions; ++dim) {
    std::vector<int64_t> begins;
    begins.reserve(boxes.size());
    for (const Box& box : boxes) {
      begins.push_back(box.offset[dim]);
    }
    std::sort(begins.begin(), begins.end());
    const size_t distinct =
        Size(std::distance(begins.begin(), std::unique(begins.begin(), begins.end())));
    if (distinct > most) {
      most = distinct;
      best = dim;
    }
  }
  return best;
}

absl::Status CheckDisjoint(std::vector<Box>& boxes, size_t axis) {
  std::sort(boxes.begin(), boxes.end(), [axis](const Box& a, const Box& b) {
    return a.offset[axis] < b.offset[axis];
  });
  std::vector<const Box*> active;
  for (const Box& box : boxes) {
    const auto ended = [&](const Box* other) {
      return other->offset[axis] + other->length[axis] <= box.offset[axis];
    };
    active.erase(std::remove_if(active.begin(), active.end(), ended), active.end());
    for (const Box* other : active) {
      if (!IsEmpty(Intersect(*other, box))) {
        return absl::DataLossError(
            absl::StrCat("chunks overlap: ", BoxText(*other), " and ", BoxText(box)));
      }
    }
    active.push_back(&box);
  }
  return absl::OkStatus();
}

// Elements of a shape, or empty when they do not fit an int64.
std::optional<int64_t> CheckedElements(const Shape& shape) {
  int64_t elements = 1;
  bool overflow = false;
  for (const int64_t size : shape) {
    if (size <= 0) {
      return size == 0 ? std::optional<int64_t>(0) : std::nullopt;
    }
    overflow = overflow || __builtin_mul_overflow(elements, size, &elements);
  }
  return overflow ? std::nullopt : std::optional<int64_t>(elements);
}

}  // namespace

absl::Status ProveBoxCover(const Shape& shape, std::vector<Box> boxes) {
  const std::optional<int64_t> wanted = CheckedElements(shape);
  if (!wanted) {
    return absl::DataLossError(absl::StrCat("shape ", ShapeText(shape), " is impossible"));
  }
  int64_t volume = 0;
  for (const Box& box : boxes) {
    RETURN_IF_ERROR(CheckInBounds(shape, box));
    if (__builtin_add_overflow(volume, ElementCount(box.length), &volume)) {
      return absl::DataLossError("chunks overlap");
    }
  }
  if (volume != *wanted) {
    return absl::DataLossError(absl::StrCat(
        "chunks hold ", volume, " elements, shape ", ShapeText(shape), " has ", *wanted));
  }
  if (shape.empty() || boxes.size() < 2) {
    return absl::OkStatus();  // the volume says it all
  }
  return CheckDisjoint(boxes, SweepAxis(boxes, shape.size()));
}

}  // namespace ravel::ckpt
