#pragma once

// One call of Store.Write: messages are read ahead on gRPC's threads while a thread of its own
// works on those that have arrived, so that network and disk are busy at the same time.

#include <deque>
#include <functional>
#include <thread>

#include <absl/base/thread_annotations.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store_server {

// Belongs to gRPC, and deletes itself when the call is over.
class WriteCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Runs once, on a thread of the call; its result ends the call. Destroyed before that is told.
  using Work = std::function<grpc::Status(WriteCall& call)>;
  static WriteCall* Start(Work work);
  // A call that is answered at once.
  static WriteCall* Refuse(const grpc::Status& status);

  // For the work. The next message as it arrived, good until the next Read; null: there are no
  // more.
  const grpc::ByteBuffer* Read();
  // A message has arrived that Read would return at once.
  bool HasArrived();
  // Returns when the reply is on its way; false: the call is over.
  bool Write(const v1::StoreWriteReply& reply);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  WriteCall() = default;
  void ReadAhead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::thread thread_;
  grpc::ByteBuffer current_;  // of the work alone
  grpc::ByteBuffer reply_;    // gRPC sends it while writing_

  Mutex mutex_;
  CondVar changed_;
  std::deque<grpc::ByteBuffer> arrived_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer incoming_ ABSL_GUARDED_BY(mutex_);  // gRPC reads into it
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more arrives
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool write_failed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ravel::store_server
