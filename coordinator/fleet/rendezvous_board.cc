#include "coordinator/fleet/rendezvous_board.h"

#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

constexpr size_t kMaxRecordBytes = 1 << 20;
constexpr size_t kMaxGroups = 64;

}  // namespace

void RendezvousBoard::Reset(int64_t world_size) {
  world_size_ = world_size;
  groups_.clear();
  complete_.clear();
  forgotten_.clear();
}

void RendezvousBoard::Forget() {
  complete_.clear();
  for (const auto& [group, records] : groups_) {
    forgotten_.insert(group);
  }
  groups_.clear();
}

absl::StatusOr<std::optional<CommRecordSet>> RendezvousBoard::Add(const CommRecord& record) {
  if (record.rank < 0 || record.rank >= world_size_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator record: rank ", record.rank, " is outside 0..", world_size_ - 1));
  }
  if (record.record.size() > kMaxRecordBytes) {
    return absl::InvalidArgumentError("communicator record: larger than 1 MiB");
  }
  if (forgotten_.contains(record.group)) {
    return std::optional<CommRecordSet>();
  }
  if (!groups_.contains(record.group) && groups_.size() >= kMaxGroups) {
    return absl::ResourceExhaustedError("communicator record: more than 64 groups");
  }
  auto& records = groups_[record.group];
  const auto [known, is_new] = records.emplace(record.rank, record.record);
  if (!is_new && known->second == record.record) {
    return std::optional<CommRecordSet>();
  }
  if (!is_new) {
    return absl::AlreadyExistsError(absl::StrCat("communicator record of rank ",
                                                 record.rank,
                                                 " for group ",
                                                 record.group,
                                                 " was used before"));
  }
  if (static_cast<int64_t>(records.size()) < world_size_) {
    return std::optional<CommRecordSet>();
  }
  CommRecordSet set;
  set.group = record.group;
  for (const auto& [rank, bytes] : records) {
    set.records.push_back(bytes);
  }
  complete_[record.group] = set;
  return std::optional<CommRecordSet>(std::move(set));
}

}  // namespace ravel::coordinator
