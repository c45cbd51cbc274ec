#include "worker/comm/gloo_communicator.h"

namespace ravel::comm {

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions&) {
  return absl::UnimplementedError("transport gloo: not in this build (portable builds have none)");
}

}  // namespace ravel::comm
