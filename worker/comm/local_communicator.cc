#include "worker/comm/local_communicator.h"

#include <utility>

#include "common/check.h"
#include "worker/comm/shared_memory_communicator.h"

namespace ravel::comm {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(int size) {
  CHECK(size >= 1 && size <= kMaxSharedRanks);
  ASSIGN_OR_RETURN(std::shared_ptr<SharedSegment> segment, LocalSegment::Create(size));
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < size; ++rank) {
    group.push_back(std::make_unique<SharedMemoryCommunicator>(segment, rank, size));
  }
  return group;
}

}  // namespace ravel::comm
