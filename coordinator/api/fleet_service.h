#pragma once

// proto/fleet.proto: decodes, posts to the strand, and carries messages back. No decisions here.

#include <cstdint>
#include <map>
#include <memory>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/jobs/executor.h"
#include "coordinator/jobs/planner.h"
#include "proto/fleet.grpc.pb.h"

namespace ravel::coordinator {

class AccessRegistry;
class JobController;
class FleetStream;

// Thread-safe.
class FleetService : public v1::Fleet::CallbackService, public FleetLink {
 public:
  // `access`: null for plaintext, where a node is whom it says it is.
  FleetService(Executor* strand, Planner* planner, AccessRegistry* access = nullptr)
      : strand_(strand), planner_(planner), access_(access) {}
  // Before the server starts.
  void SetController(JobController* controller) { controller_ = controller; }
  // Ends all streams, and those that begin from here on: the server is going down.
  void CloseAll();

  grpc::ServerBidiReactor<v1::Up, v1::Down>* Connect(grpc::CallbackServerContext* context) override;
  grpc::ServerWriteReactor<v1::PlanChunk>* FetchPlan(grpc::CallbackServerContext* context,
                                                     const v1::FetchPlanRequest* request) override;

  void Send(StreamId stream, DownMessage message) override;
  void Close(StreamId stream) override;
  int64_t ArrivalMs(StreamId stream) override;

 private:
  friend class FleetStream;
  void Forget(StreamId stream);
  void Worked(StreamId stream);

  Executor* strand_;
  Planner* planner_;
  AccessRegistry* access_;
  JobController* controller_ = nullptr;
  Mutex mutex_;
  // Shared: a stream may end while a message is on its way to it.
  std::map<StreamId, std::shared_ptr<FleetStream>> streams_ ABSL_GUARDED_BY(mutex_);
  StreamId last_stream_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ravel::coordinator
