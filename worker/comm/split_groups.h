#pragma once

// How the ranks of a communicator agree on the groups of a split.

#include <cstdint>
#include <span>
#include <vector>

#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/issue_log.h"

namespace ravel::comm {

IssueLog::Group WholeGroup(int size);

// The name of the split as an amount, so that it is part of the issue hash.
IssueLog::Amount SplitAmount(const Communicator::SplitOptions& options);

// Returns the row by which a rank tells all others its group: `size` numbers.
std::vector<int32_t> SplitRow(const Communicator::SplitOptions& options, int size);

// The rows of all ranks -> for each rank the first member of its group. FailedPrecondition names
// the ranks whose groups are not ascending, do not hold themselves or are not the same.
absl::StatusOr<std::vector<int>> SplitLeaders(std::span<const int32_t> rows, int size);

// Index of `rank`, which is a member.
int PositionIn(const std::vector<int>& members, int rank);

}  // namespace ravel::comm
