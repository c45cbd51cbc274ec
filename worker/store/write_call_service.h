#pragma once

// One call of Store.Write: messages are read ahead on gRPC's threads while a thread of its own
// works on those that have arrived, so that network and disk are busy at the same time.

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store_server {

// Belongs to gRPC, and deletes itself when the call is over.
class WriteCall final : public grpc::ServerBidiReactor<v1::StoreWriteRequest, v1::StoreWriteReply> {
 public:
  // Runs once, on a thread of the call; its result ends the call. Destroyed before that is told.
  using Work = std::function<grpc::Status(WriteCall& call)>;
  static WriteCall* Start(Work work);
  // A call that is answered at once.
  static WriteCall* Refuse(const grpc::Status& status);

  // For the work. The next message, good until the next Read; null: there are no more.
  const v1::StoreWriteRequest* Read();
  // A message has arrived that Read would return at once.
  bool HasArrived();
  // Returns when the reply is on its way; false: the call is over.
  bool Write(const v1::StoreWriteReply& reply);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  using Message = std::unique_ptr<v1::StoreWriteRequest>;

  WriteCall() = default;
  void ReadAhead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::thread thread_;
  Message current_;  // of the work alone

  Mutex mutex_;
  CondVar changed_;
  std::deque<Message> arrived_ ABSL_GUARDED_BY(mutex_);
  Message incoming_ ABSL_GUARDED_BY(mutex_);            // gRPC reads into it
  std::vector<Message> spare_ ABSL_GUARDED_BY(mutex_);  // with their memory, for the next ones
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more arrives
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool write_failed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ravel::store_server
