// Mixed-radix arithmetic over ranks. With stride[i] = product of the sizes of all axes after i,
//   rank = sum over i of coordinate[i] * stride[i],   coordinate[i] = rank / stride[i] % size[i]
// A group over some axes is all ranks that agree on the others; splitting an axis keeps every
// rank's number. Functions cost the number of axes, except those that return lists of ranks.

#include "common/plan/layout/mesh.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {

absl::StatusOr<Mesh> Mesh::Create(std::vector<MeshAxis> axes) {
  Mesh mesh;
  for (size_t i = 0; i < axes.size(); ++i) {
    const MeshAxis& axis = axes[i];
    if (axis.name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("mesh: axis ", i, " has no name"));
    }
    if (axis.size < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: axis ", axis.name, ": size ", axis.size, ", expected at least 1"));
    }
    for (size_t j = 0; j < i; ++j) {
      if (axes[j].name == axis.name) {
        return absl::InvalidArgumentError(absl::StrCat("mesh: axis ", axis.name, " appears twice"));
      }
    }
    if (axis.size > kMostRanks / mesh.rank_count_) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh: axis ", axis.name, ": more than ", kMostRanks, " ranks in all"));
    }
    mesh.rank_count_ *= axis.size;
  }
  mesh.strides_.assign(axes.size(), 1);
  for (size_t i = axes.size(); i-- > 1;) {
    mesh.strides_[i - 1] = mesh.strides_[i] * axes[i].size;
  }
  mesh.axes_ = std::move(axes);
  return mesh;
}

int Mesh::AxisIndex(std::string_view name) const {
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int64_t Mesh::AxisSize(std::string_view name) const {
  const int index = AxisIndex(name);
  return index < 0 ? 1 : At(axes_, index).size;
}

Coordinate Mesh::CoordinateOf(int64_t rank) const {
  CHECK(rank >= 0 && rank < rank_count_);
  Coordinate coordinate(axes_.size());
  for (size_t i = 0; i < axes_.size(); ++i) {
    coordinate[i] = rank / strides_[i] % axes_[i].size;
  }
  return coordinate;
}

int64_t Mesh::RankOf(const Coordinate& coordinate) const {
  CHECK_EQ(coordinate.size(), axes_.size());
  int64_t rank = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    CHECK(coordinate[i] >= 0 && coordinate[i] < axes_[i].size);
    rank += coordinate[i] * strides_[i];
  }
  return rank;
}

std::vector<int64_t> Mesh::GroupOf(int64_t rank, const std::vector<std::string>& axes) const {
  Coordinate coordinate = CoordinateOf(rank);
  for (const std::string& name : axes) {
    const int axis = AxisIndex(name);
    CHECK_MSG(axis >= 0, name.c_str());
    At(coordinate, axis) = 0;
  }
  std::vector<int64_t> group = {RankOf(coordinate)};
  for (const std::string& name : axes) {
    const size_t axis = Size(AxisIndex(name));
    std::vector<int64_t> finer;
    finer.reserve(group.size() * Size(axes_[axis].size));
    for (const int64_t base : group) {
      for (int64_t index = 0; index < axes_[axis].size; ++index) {
        finer.push_back(base + index * strides_[axis]);
      }
    }
    group = std::move(finer);
  }
  return group;
}

int64_t Mesh::GroupIndex(int64_t rank, const std::vector<std::string>& axes) const {
  const Coordinate coordinate = CoordinateOf(rank);
  int64_t position = 0;
  for (const std::string& name : axes) {
    const int axis = AxisIndex(name);
    CHECK_MSG(axis >= 0, name.c_str());
    position = position * At(axes_, axis).size + At(coordinate, axis);
  }
  return position;
}

std::vector<std::vector<int64_t>> Mesh::Groups(const std::vector<std::string>& axes) const {
  std::vector<std::vector<int64_t>> groups;
  for (int64_t rank = 0; rank < rank_count_; ++rank) {
    if (GroupIndex(rank, axes) == 0) {
      groups.push_back(GroupOf(rank, axes));
    }
  }
  return groups;
}

absl::StatusOr<Mesh> Mesh::Split(std::string_view axis, MeshAxis outer, MeshAxis inner) const {
  const int index = AxisIndex(axis);
  if (index < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh ", Text(), ": no axis ", std::string(axis), " to split"));
  }
  const int64_t size = At(axes_, index).size;
  if (outer.size < 1 || inner.size < 1 || size % inner.size != 0 ||
      size / inner.size != outer.size) {
    return absl::InvalidArgumentError(absl::StrCat("mesh: axis ",
                                                   std::string(axis),
                                                   " of ",
                                                   size,
                                                   " cannot be ",
                                                   outer.name,
                                                   " ",
                                                   outer.size,
                                                   " x ",
                                                   inner.name,
                                                   " ",
                                                   inner.size));
  }
  std::vector<MeshAxis> axes = axes_;
  At(axes, index) = std::move(outer);
  axes.insert(axes.begin() + index + 1, std::move(inner));
  return Create(std::move(axes));
}

absl::StatusOr<Mesh> Mesh::ExpertView(int64_t expert_size) const {
  const int64_t size = AxisSize(kShardAxis);
  if (expert_size < 1 || size % expert_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("mesh ",
                                                   Text(),
                                                   ": axis ",
                                                   kExpertAxis,
                                                   ": size ",
                                                   expert_size,
                                                   " does not divide axis ",
                                                   kShardAxis,
                                                   " of ",
                                                   size));
  }
  return Split(kShardAxis,
               {.name = kShardAxis, .size = size / expert_size},
               {.name = kExpertAxis, .size = expert_size});
}

const std::string& InnermostDataAxis(const Mesh& mesh) {
  const auto axis =
      std::find_if(mesh.axes().rbegin(), mesh.axes().rend(), [](const MeshAxis& candidate) {
        return candidate.name != kTensorAxis;
      });
  CHECK_MSG(axis != mesh.axes().rend(), "a mesh without data axes");
  return axis->name;
}

std::string Mesh::Text() const {
  if (axes_.empty()) {
    return "one rank";
  }
  std::string text;
  for (const MeshAxis& axis : axes_) {
    absl::StrAppend(&text, text.empty() ? "" : " x ", axis.name, " ", axis.size);
  }
  return text;
}

}  // namespace ravel::plan
