#pragma once

// Communicator records of one (job, epoch), collected until a group is complete. In memory only;
// never logged.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "coordinator/fleet_messages.h"

namespace ravel::coordinator {

// Used only from the controller's strand.
class RendezvousBoard {
 public:
  // Forgets everything: a new epoch.
  void Reset(int64_t world_size);
  // The whole set, in rank order, when this record completes its group. A second record of the same
  // rank is refused (single use), as is a rank outside the world or a record that is too large.
  absl::StatusOr<std::optional<CommRecordSet>> Add(const CommRecord& record);

 private:
  int64_t world_size_ = 0;
  std::map<std::string, std::map<int64_t, std::string>> groups_;
};

}  // namespace ravel::coordinator
