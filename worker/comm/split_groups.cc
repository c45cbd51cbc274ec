#include "worker/comm/split_groups.h"

#include <algorithm>
#include <numeric>
#include <string>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::comm {
namespace {

std::vector<int> MembersOf(std::span<const int32_t> row) {
  std::vector<int> members;
  for (const int32_t member : row) {
    if (member >= 0) {
      members.push_back(member);
    }
  }
  return members;
}

bool IsGroupOf(const std::vector<int>& members, int rank, int size) {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal()) == members.end();
  return ascending && !members.empty() && members.back() < size &&
         std::binary_search(members.begin(), members.end(), rank);
}

}  // namespace

IssueLog::Group WholeGroup(int size) {
  IssueLog::Group group = {.name = "world", .members = std::vector<int>(Size(size))};
  std::iota(group.members.begin(), group.members.end(), 0);
  return group;
}

IssueLog::Amount SplitAmount(const Communicator::SplitOptions& options) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : options.name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  }
  return {.elements = static_cast<int64_t>(hash >> 1), .element_bytes = 1};
}

std::vector<int32_t> SplitRow(const Communicator::SplitOptions& options, int size) {
  std::vector<int32_t> row(Size(size), -1);
  const size_t count = std::min(options.members.size(), row.size());
  std::copy_n(options.members.begin(), count, row.begin());
  return row;
}

absl::StatusOr<std::vector<int>> SplitLeaders(std::span<const int32_t> rows, int size) {
  const auto row_of = [&](int rank) {
    return MembersOf(rows.subspan(Size(rank) * Size(size), Size(size)));
  };
  std::vector<int> leaders;
  for (int r = 0; r < size; ++r) {
    const std::vector<int> members = row_of(r);
    if (!IsGroupOf(members, r, size)) {
      return absl::FailedPreconditionError(
          absl::StrCat("split: rank ",
                       r,
                       " names the group {",
                       absl::StrJoin(members, ","),
                       "}, expected ascending ranks with its own"));
    }
    for (const int member : members) {
      if (row_of(member) != members) {
        return absl::FailedPreconditionError(absl::StrCat("split: rank ",
                                                          r,
                                                          " names the group {",
                                                          absl::StrJoin(members, ","),
                                                          "}, its member ",
                                                          member,
                                                          " names {",
                                                          absl::StrJoin(row_of(member), ","),
                                                          "}"));
      }
    }
    leaders.push_back(members.front());
  }
  return leaders;
}

int PositionIn(const std::vector<int>& members, int rank) {
  const auto found = std::lower_bound(members.begin(), members.end(), rank);
  CHECK(found != members.end() && *found == rank);
  return static_cast<int>(found - members.begin());
}

}  // namespace ravel::comm
