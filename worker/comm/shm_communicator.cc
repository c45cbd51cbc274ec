#include "worker/comm/shm_communicator.h"

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/signed_size.h"
#include "worker/comm/shared_memory_communicator.h"

namespace ravel::comm {

absl::StatusOr<std::unique_ptr<Communicator>> CreateShmCommunicator(int rank,
                                                                    int size,
                                                                    const Rendezvous& rendezvous) {
  std::shared_ptr<MemfdSegment> segment;
  std::string record = "shm1:member";
  if (rank == 0) {
    ASSIGN_OR_RETURN(segment, MemfdSegment::Create(size));
    record = segment->record();
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> records, rendezvous("shm", std::move(record)));
  if (records.size() != Size(size)) {
    return absl::InternalError(
        absl::StrCat("rendezvous of group shm: ", records.size(), " records, expected ", size));
  }
  if (rank != 0) {
    ASSIGN_OR_RETURN(segment, MemfdSegment::Open(records[0], size));
  }
  return std::make_unique<SharedMemoryCommunicator>(std::move(segment), rank, size);
}

}  // namespace ravel::comm
