#pragma once

// The ranks of a job as an N-D grid. Pure arithmetic: nothing here grows with the number of ranks,
// except where a list of ranks is asked for.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel::plan {

inline constexpr char kReplicateAxis[] = "replicate";
inline constexpr char kShardAxis[] = "shard";
inline constexpr char kExpertAxis[] = "expert";
inline constexpr char kTensorAxis[] = "tensor";

struct MeshAxis {
  std::string name;
  int64_t size = 1;
  bool operator==(const MeshAxis&) const = default;
};

// One index per axis, outermost first.
using Coordinate = std::vector<int64_t>;

// Ordered axes, outermost first; rank = mixed radix of the coordinate, the last axis fastest. A
// view is another Mesh of the same ranks: an axis that is split in place renumbers none of them.
class Mesh {
 public:
  static constexpr int64_t kMostRanks = int64_t{1} << 24;

  Mesh() = default;  // one rank, no axes

  // Refuses empty and repeated names, sizes below 1 and more than kMostRanks ranks; errors name the
  // axis.
  static absl::StatusOr<Mesh> Create(std::vector<MeshAxis> axes);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int64_t rank_count() const { return rank_count_; }
  // Position of the axis, outermost 0, or -1.
  int AxisIndex(std::string_view name) const;
  // 1 for an axis that the mesh lacks.
  int64_t AxisSize(std::string_view name) const;

  Coordinate CoordinateOf(int64_t rank) const;
  int64_t RankOf(const Coordinate& coordinate) const;

  // The ranks that differ from `rank` at most on these axes, which the mesh has: its group for a
  // collective over them. Group order is mixed radix in the order of `axes`, the first slowest, so
  // {shard, replicate} is inner-major whatever the mesh order is.
  std::vector<int64_t> GroupOf(int64_t rank, const std::vector<std::string>& axes) const;
  // Position of `rank` in its group.
  int64_t GroupIndex(int64_t rank, const std::vector<std::string>& axes) const;
  // Every group of these axes once, ordered by its first rank.
  std::vector<std::vector<int64_t>> Groups(const std::vector<std::string>& axes) const;

  // The view in which `axis` is two axes, `outer` and then `inner`; the new outer axis may keep the
  // name. Refuses sizes whose product is not the axis' and names in use.
  absl::StatusOr<Mesh> Split(std::string_view axis, MeshAxis outer, MeshAxis inner) const;
  // The view for experts: `shard` of N becomes `shard` of N / expert_size and, inside it, `expert`.
  absl::StatusOr<Mesh> ExpertView(int64_t expert_size) const;

  // "replicate 2 x shard 4"; "one rank" without axes.
  std::string Text() const;
  bool operator==(const Mesh&) const = default;

 private:
  std::vector<MeshAxis> axes_;
  std::vector<int64_t> strides_;  // ranks between neighbours on the axis
  int64_t rank_count_ = 1;
};

// The innermost axis whose ranks have other samples than the next: all but `tensor`, whose ranks
// have the same. Such an axis is there.
const std::string& InnermostDataAxis(const Mesh& mesh);

}  // namespace ravel::plan
