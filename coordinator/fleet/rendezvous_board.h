#pragma once

// Communicator records of one (job, epoch), collected until a group is complete. In memory only;
// never logged.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/status.h"
#include "coordinator/fleet/fleet_messages.h"

namespace ravel::coordinator {

// Used only from the controller's strand.
class RendezvousBoard {
 public:
  // Forgets everything: a new epoch.
  void Reset(int64_t world_size);
  // The whole set, in rank order, when this record completes its group. The same record may come
  // again: a daemon repeats what was not answered. Another record of the same rank is refused, as
  // is a rank outside the world or a record that is too large.
  absl::StatusOr<std::optional<CommRecordSet>> Add(const CommRecord& record);
  // Sets that are complete, by group: sent again to ranks that lack them.
  const std::map<std::string, CommRecordSet>& complete() const { return complete_; }
  // All ranks have met: the secrets are no longer needed.
  void Forget();

 private:
  int64_t world_size_ = 0;
  std::map<std::string, std::map<int64_t, std::string>> groups_;
  std::map<std::string, CommRecordSet> complete_;
  std::set<std::string> forgotten_;  // groups that have met: what is said of them again is ignored
};

}  // namespace ravel::coordinator
